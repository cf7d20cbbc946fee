import pytest
import torch

from engine.torch_backend import TorchBackend
from tests.factories import tiny_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def torch_backend(model_folder):
    torch.set_num_threads(1)
    return TorchBackend(model_folder, "float32", torch.device("cpu"))
