"""The exported folder is a plain transformers model, and is there whole or not at all."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForZeroShotObjectDetection, AutoProcessor

from gdino_lab.models import export
from gdino_lab.models.anomaly_detector import AnomalyDetector
from gdino_lab.models.box_detector import BoxDetector
from gdino_lab.models.export import ADAPTER, HEADS, Knowledge, load_heads, load_knowledge, save_adapter, save_model
from gdino_lab.models.export import KNOWLEDGE as KNOWLEDGE_FILE
from gdino_lab.models.grounding_dino import build
from gdino_lab.models.tuning import Frozen, Full, Lora

NANO = yaml.safe_load((Path(__file__).parents[2] / "conf" / "model" / "nano.yaml").read_text())["model"]["config"]
KNOWLEDGE = Knowledge({"names": ["nut", "Café"]}, {"a/b": np.arange(6.0).reshape(2, 3)})
TUNINGS = {"full": Full(), "frozen": Frozen(), "lora": Lora(2, 4, 0.0, ["query", "fc1", "output_proj"])}


def module_of(tuning, architecture="grounding_dino"):
    torch.manual_seed(0)
    detector, processor = build(architecture, config=NANO)
    module = AnomalyDetector(tuning.prepare(detector), part_kinds=2)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0, 0.1)
    return module, processor


def weights_of(module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.fixture(scope="module")
def full():
    return module_of(Full())


@pytest.mark.parametrize("architecture", ["grounding_dino", "mm_grounding_dino"])
@pytest.mark.parametrize("name", TUNINGS)
def test_the_folder_loads_with_transformers_alone(tmp_path, name, architecture):
    tuning = TUNINGS[name]
    module, processor = module_of(tuning, architecture)
    weights = weights_of(module)
    # What is written is `weights`, not what the module happens to hold.
    for key in weights:
        if key.endswith("bias"):
            weights[key] += 0.25
    folder = tmp_path / "model"
    save_model(folder, module, weights, tuning, processor, KNOWLEDGE)

    model, report = AutoModelForZeroShotObjectDetection.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    expected = tuning.plain({k.removeprefix("detector."): v for k, v in weights.items() if k.startswith("detector.")})
    loaded = model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], value) for key, value in expected.items())
    heads = load_file(folder / HEADS)
    assert heads.keys() == module.heads.state_dict().keys()
    assert all(torch.equal(value, weights[f"heads.{key}"]) for key, value in heads.items())
    prompt = "long screw . nut ."
    reloaded = AutoProcessor.from_pretrained(folder, backend="pil")
    assert reloaded.tokenizer(prompt)["input_ids"] == processor.tokenizer(prompt)["input_ids"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_exported_model_answers_as_the_trained_one(tmp_path):
    module, processor = module_of(TUNINGS["lora"])
    save_model(tmp_path / "model", module, weights_of(module), TUNINGS["lora"], processor, KNOWLEDGE)
    batch = dict(processor.tokenizer("nut . washer .", return_tensors="pt"))
    batch |= {"pixel_values": torch.randn(1, 3, 64, 80), "pixel_mask": torch.ones(1, 64, 80, dtype=torch.long)}
    exported = AutoModelForZeroShotObjectDetection.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        trained, loaded = (model.eval().model(**batch) for model in (module.detector, exported))
    vision = trained.encoder_last_hidden_state_vision
    torch.testing.assert_close(loaded.encoder_last_hidden_state_vision, vision, rtol=0, atol=2e-4)


def test_an_older_folder_is_replaced_whole(tmp_path, full):
    module, processor = full
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "stale.safetensors").write_bytes(b"of another run")
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "left_behind").touch()
    save_model(folder, module, weights_of(module), Full(), processor, KNOWLEDGE)
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", HEADS} <= names
    assert not names & {"stale.safetensors", "left_behind"}
    weights = weights_of(module)
    weights["heads.verdict.2.bias"] += 1
    save_model(folder, module, weights, Full(), processor, KNOWLEDGE)
    assert torch.equal(load_file(folder / HEADS)["verdict.2.bias"], weights["heads.verdict.2.bias"])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_heads_and_knowledge_come_back_as_they_were(tmp_path, full):
    module, processor = full
    save_model(tmp_path / "model", module, weights_of(module), Full(), processor, KNOWLEDGE)
    other, _ = module_of(Full())
    with torch.no_grad():
        for parameter in other.heads.parameters():
            parameter.zero_()
    load_heads(tmp_path / "model", other)
    assert all(torch.equal(value, other.heads.state_dict()[key]) for key, value in module.heads.state_dict().items())
    found = load_knowledge(tmp_path / "model")
    assert found.facts == KNOWLEDGE.facts
    assert found.arrays.keys() == {"a/b"} and np.array_equal(found.arrays["a/b"], KNOWLEDGE.arrays["a/b"])


def test_a_detector_without_heads_leaves_no_file_of_them(tmp_path, full):
    module, processor = full
    bare = BoxDetector(module.detector)
    save_model(tmp_path / "model", bare, weights_of(bare), Full(), processor, Knowledge())
    assert not (tmp_path / "model" / HEADS).exists()
    load_heads(tmp_path / "model", bare)
    assert load_knowledge(tmp_path / "model") == Knowledge({}, {})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("older", [False, True], ids=["first", "over_an_older_one"])
@pytest.mark.parametrize("step", ["weights", "processor", "heads"])
def test_a_failure_leaves_the_older_folder_or_none(tmp_path, monkeypatch, full, older, step):
    module, processor = full
    folder = tmp_path / "model"
    if older:
        folder.mkdir()
        (folder / "config.json").write_text("an older model")
    before = contents(folder)

    def fails(*args, **kwargs):
        raise OSError("no space left on device")

    if step == "heads":
        monkeypatch.setattr(export, "save_file", fails)
    else:
        owner = module.detector if step == "weights" else processor
        monkeypatch.setattr(type(owner), "save_pretrained", fails)
    with pytest.raises(OSError, match="no space left"):
        save_model(folder, module, weights_of(module), Full(), processor, KNOWLEDGE)
    assert folder.exists() == older and contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if older else [])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks transformers
@pytest.mark.parametrize("architecture", ["grounding_dino", "mm_grounding_dino"])
def test_peft_finds_every_adapter_and_merges_as_we_do(tmp_path, architecture):
    tuning = TUNINGS["lora"]
    torch.manual_seed(0)
    base, _ = build(architecture, config=NANO)
    module, processor = module_of(tuning, architecture)
    weights = weights_of(module)
    save_adapter(tmp_path / "adapter", weights, tuning, "someone/base", processor, KNOWLEDGE)
    stored = load_file(tmp_path / "adapter" / ADAPTER)
    assert len(stored) == sum(".lora_" in name for name in weights)
    base.get_input_embeddings = base.model.text_backbone.get_input_embeddings
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert adapted.peft_config["default"].base_model_name_or_path == "someone/base"
    given = {name.replace(".default.", "."): each for name, each in adapted.state_dict().items() if ".lora_" in name}
    assert given.keys() == stored.keys() and all(torch.equal(given[name], each) for name, each in stored.items())
    merged = adapted.merge_and_unload().state_dict()
    ours = tuning.plain({k.removeprefix("detector."): v for k, v in weights.items() if k.startswith("detector.")})
    assert merged.keys() == ours.keys() and all(torch.equal(merged[name], each) for name, each in ours.items())
    assert load_knowledge(tmp_path / "adapter").facts == KNOWLEDGE.facts and (tmp_path / "adapter" / HEADS).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_without_knowledge_there_is_no_file_of_it(tmp_path, full):
    module, processor = full
    save_model(tmp_path / "model", module, weights_of(module), Full(), processor, None)
    assert not (tmp_path / "model" / KNOWLEDGE_FILE).exists()
