"""What the fake backend says of itself before it starts."""

from engine.backends.spec import BackendSpec

EMBEDDING_WIDTH = 16

SPEC = BackendSpec(
    name="fake",
    create="engine.backends.fake.backend:create_backend",
    packages=("torch",),
    install="Install torch (pip install 'nightshelf[torch]'), whose tensors it computes with.",
    gpu="never",
    native_beams=False,
    embedding_width=EMBEDDING_WIDTH,
)
