"""How large a checkpoint is, by its files; the weights' size where an engine's log does not tell it."""

import pytest

from orchestrator.box import checkpoint
from orchestrator.box.transports import LocalTransport

ENGINE = ("/opt/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server")
MIB = 2**20


@pytest.fixture
def here():
    transport = LocalTransport()
    yield transport
    transport.close()


@pytest.fixture
def model(tmp_path):
    """A folder with 3 + 5 GiB of safetensors, the second by a link as a hub's cache has it, and older files beside."""
    folder = tmp_path / "the model"
    folder.mkdir()
    for name, mib in (("model-1.safetensors", 3072), ("blob", 5120), ("pytorch_model.bin", 9000)):
        with (folder / name).open("wb") as file:
            file.truncate(mib * MIB)
    (folder / "model-2.safetensors").symlink_to(folder / "blob")
    (folder / "config.json").write_text("{}")
    return folder


def test_the_safetensors_of_a_folder_are_shared_out_over_the_cards(here, model):
    commands = {
        "one": (*ENGINE, "--model", str(model)),
        "two": (*ENGINE, "--model", str(model), "-tp", "2"),
        "serve": ("vllm", "serve", str(model), "--port", "8000"),
    }
    assert checkpoint.per_card_gib(here, commands) == {"one": 8.0, "two": 4.0, "serve": 8.0}


def test_a_single_file_is_its_own_size_and_each_variant_has_its_own_model(here, model):
    quantised = model / "q4.gguf"
    with quantised.open("wb") as file:
        file.truncate(2048 * MIB)
    commands = {"q4": (*ENGINE, "--model", str(quantised)), "full": (*ENGINE, "--model", str(model))}
    assert checkpoint.per_card_gib(here, commands) == {"q4": 2.0, "full": 8.0}


@pytest.mark.parametrize(
    "flags",
    [
        ("--model", "Qwen/Qwen3-8B"),
        ("--model", "/no/such/model"),
        ("--model", "{model}", "--load-format", "dummy"),
        ("--port", "8000"),
    ],
)
def test_a_model_on_a_hub_one_that_is_not_there_and_one_that_is_not_loaded_have_no_size(here, model, flags):
    argv = (*ENGINE, *(word.format(model=model) for word in flags))
    assert checkpoint.per_card_gib(here, {"v": argv}) == {}
