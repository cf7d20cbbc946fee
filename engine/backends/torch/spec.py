"""What the torch backend says of itself before it starts."""

from engine.backends.spec import BackendSpec

SPEC = BackendSpec(
    name="torch",
    create="engine.backends.torch.backend:create_backend",
    packages=("torch", "transformers", "safetensors"),
    install="Install its packages (pip install 'nightshelf[torch]') or correct engine.backend.",
    reads_checkpoint=True,
    own_forward=True,
    native_beams=False,
    before_a_run="engine.backends.torch.before:before_a_run",
)
