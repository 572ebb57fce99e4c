"""Building the detector: random or from a folder, and every argument that cannot work refused with its cure."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoProcessor

from gdino_lab.data.images import MEAN, STD
from gdino_lab.errors import ConfigurationError
from gdino_lab.models.grounding_dino import ARCHITECTURES, VOCABULARY, build, check, random_weights_processor

NANO = yaml.safe_load((Path(__file__).parents[2] / "conf" / "model" / "nano.yaml").read_text())["model"]["config"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """As if HF_HUB_OFFLINE=1 had been set before the import."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def built(architecture="grounding_dino", seed=0, config=NANO):
    torch.manual_seed(seed)
    return build(architecture, config=config)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    found = {}
    for architecture in ARCHITECTURES:
        model, processor = built(architecture)
        found[architecture] = tmp_path_factory.mktemp(architecture)
        model.save_pretrained(found[architecture])
        processor.save_pretrained(found[architecture])
    return found


# --- the vocabulary -------------------------------------------------------------------------------------------------


def test_special_tokens_sit_where_grounding_dino_looks_for_them():
    lines = VOCABULARY.read_text().splitlines()
    assert len(set(lines)) == len(lines) == NANO["text_config"]["vocab_size"]
    assert all(line and line == line.strip() for line in lines)
    assert [lines[number] for number in (101, 102, 1012, 1029)] == ["[CLS]", "[SEP]", ".", "?"]
    tokenizer = random_weights_processor().tokenizer
    assert tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]", ".", "?"]) == [101, 102, 1012, 1029]
    assert tokenizer.pad_token_id == lines.index("[PAD]") and tokenizer.unk_token_id == lines.index("[UNK]")


def test_prompts_are_read_without_unknown_words():
    tokenizer = random_weights_processor().tokenizer
    for path in sorted((Path(__file__).parents[2] / "conf" / "data").glob("*.yaml")):
        for phrases in yaml.safe_load(path.read_text()).get("prompt", {}).values():
            ids = tokenizer(" ".join(f"{phrase} ." for phrase in phrases))["input_ids"]
            assert ids[0] == 101 and ids[-2:] == [1012, 102] and ids.count(1012) == len(phrases)
            assert tokenizer.unk_token_id not in ids, phrases
    assert tokenizer("Long SCREW.")["input_ids"] == tokenizer("long screw .")["input_ids"]
    assert tokenizer.unk_token_id not in tokenizer("xylophonist zebra-like qvwx 42")["input_ids"]


# --- building -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_weights_follow_the_generator(architecture, caplog):
    one, two, other = (built(architecture, seed)[0] for seed in (0, 0, 1))
    assert isinstance(one, ARCHITECTURES[architecture][1]) and one.config.d_model == 64
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert "RANDOM WEIGHTS" in caplog.text and "model.pretrained" in caplog.text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_folder_gives_the_same_model_and_tokens(folders, architecture, caplog):
    expected, processor = built(architecture)
    caplog.clear()
    model, loaded = build(architecture, pretrained=str(folders[architecture]))
    assert "RANDOM" not in caplog.text
    assert type(model) is type(expected) and model.config.to_dict().keys() == expected.config.to_dict().keys()
    weights = model.state_dict()
    assert weights.keys() == expected.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.state_dict().items())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    prompt = "long screw . nut ."
    assert loaded.tokenizer(prompt)["input_ids"] == processor.tokenizer(prompt)["input_ids"]


def test_half_precision_folders_are_loaded_in_single(folders, tmp_path):
    model, processor = built()
    model.to(torch.float16).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded, _ = build("grounding_dino", pretrained=str(tmp_path))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


def test_the_saved_processor_reloads_and_prepares_an_image(folders):
    processor = AutoProcessor.from_pretrained(folders["grounding_dino"], backend="pil")
    image = torch.zeros(40, 60, 3, dtype=torch.uint8).numpy()
    batch = processor(images=image, text="nut . washer .", return_tensors="pt")
    assert batch["input_ids"][0, [0, -1]].tolist() == [101, 102]
    assert batch["pixel_values"].shape[:2] == (1, 3)
    black = [-mean / std for mean, std in zip(MEAN, STD, strict=True)]  # what training's own to_tensor gives
    assert batch["pixel_values"][0].flatten(1).amax(1).tolist() == pytest.approx(black, abs=1e-4)


# --- what cannot work -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_cached_is_loaded_without_asking_the_hub(folders, tmp_path):
    """Where it cannot be reached each file would be tried for half a minute."""
    cached = tmp_path / "hub" / "models--somebody--model"
    shutil.copytree(folders["grounding_dino"], cached / "snapshots" / "0123")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    unreachable = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    script = "from gdino_lab.models.grounding_dino import build\nprint(type(build('grounding_dino', 'somebody/model')[0]))"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | unreachable, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "GroundingDinoForObjectDetection" in done.stdout, done.stderr
    assert "127.0.0.1" not in done.stderr


def test_sound_arguments_have_no_complaints(folders):
    for architecture, folder in folders.items():
        assert check(architecture, None, NANO) == check(architecture, None, {}) == check(architecture, None, None) == []
        assert check(architecture, str(folder)) == check(architecture, str(folder), NANO) == []


def test_an_unknown_architecture_is_named_with_the_nearest():
    (complaint,) = check("grounding_dinno", None, NANO)
    assert complaint.startswith("model.architecture=grounding_dinno:")
    assert "mm_grounding_dino" in complaint and "Did you mean 'grounding_dino'?" in complaint


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"d_model": "wide"}, "d_model"),
        ({"backbone_config": {"model_type": "swinn"}}, "swinn"),
        ({"encoder_attention_head": 4}, "encoder_attention_head"),
        ({"backbone_config": NANO["backbone_config"] | {"depth": [1, 1, 1, 1]}}, "depth"),
        ({"text_config": NANO["text_config"] | {"hiden_size": 64}}, "hiden_size"),
    ],
    ids=["type", "backbone", "key", "backbone_key", "text_key"],
)
def test_a_wrong_config_is_refused_by_name(wrong, named):
    (complaint,) = check("grounding_dino", None, NANO | wrong)
    assert complaint.startswith("model.config")
    assert named in complaint


def test_a_folder_without_a_config_is_refused(tmp_path):
    (complaint,) = check("grounding_dino", str(tmp_path))
    assert str(tmp_path) in complaint and "config.json" in complaint
    with pytest.raises(ConfigurationError, match=r"model\.pretrained="):
        build("grounding_dino", pretrained=str(tmp_path))


@pytest.mark.parametrize(
    "pretrained", ["/no/such/folder", "./outputs/no/such/model", "IDEA-Research/no-such-model", "a b"], ids=str
)
def test_what_is_neither_there_nor_cached_is_refused_with_its_cure(pretrained):
    (complaint,) = check("grounding_dino", pretrained)
    assert complaint.startswith(f"model.pretrained={pretrained}:")
    assert "model.pretrained=null" in complaint and "DIR" in complaint
    with pytest.raises(ConfigurationError, match=r"model\.pretrained=.*null") as caught:
        build("grounding_dino", pretrained=pretrained)
    assert len(caught.value.complaints) == 1 and "\n" not in str(caught.value)


def test_complaints_come_together():
    assert len(check("dino", "IDEA-Research/no-such-model", NANO)) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("how", ["missing", "truncated", "empty"])
def test_a_broken_folder_is_refused_by_name(folders, tmp_path, name, how):
    folder = shutil.copytree(folders["grounding_dino"], tmp_path / "model")
    path = folder / name
    content = path.read_bytes()
    path.unlink()
    if how != "missing":
        path.write_bytes(content[: len(content) // 2 if how == "truncated" else 0])
    with pytest.raises(ConfigurationError, match=r"model\.pretrained="):
        build("grounding_dino", pretrained=str(folder))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_folder_of_another_architecture_is_refused(folders, architecture):
    (other,) = set(ARCHITECTURES) - {architecture}
    assert json.loads((folders[other] / "config.json").read_text())["model_type"] == other.replace("_", "-")
    with pytest.raises(ConfigurationError, match=r"architecture"):
        build(architecture, pretrained=str(folders[other]))


# --- folders of others ----------------------------------------------------------------------------------------------


class Hostile:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def published(folders, tmp_path) -> Path:
    """A folder to change, without its safetensors."""
    shutil.copytree(folders["grounding_dino"], tmp_path / "published", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "published"


def test_a_pickle_of_tensors_is_loaded(folders, published):
    torch.save(load_file(folders["grounding_dino"] / "model.safetensors"), published / "pytorch_model.bin")
    found, expected = (build("grounding_dino", str(folder))[0].state_dict() for folder in (published, folders["grounding_dino"]))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], each) for name, each in expected.items())


@pytest.mark.parametrize("form", ["archive", "legacy", "bare", "shard", "adapter"])
def test_any_other_pickle_is_refused_and_does_nothing(folders, published, tmp_path, form):
    hostile = Hostile(tmp_path / "ran")
    weights = load_file(folders["grounding_dino"] / "model.safetensors")
    path = published / "pytorch_model.bin"
    if form == "bare":
        path.write_bytes(pickle.dumps(hostile))
    elif form == "shard":
        torch.save({"x": hostile}, published / "part-1.bin")
        (published / "pytorch_model.bin.index.json").write_text('{"metadata": {}, "weight_map": {"x": "part-1.bin"}}')
    elif form == "adapter":
        torch.save(weights, path)
        torch.save({"x": hostile}, published / "adapter_model.bin")
    else:
        torch.save(weights | {"x": hostile}, path, _use_new_zipfile_serialization=form == "archive")
    with pytest.raises(ConfigurationError, match="is no file of weights.*which is never done") as caught:
        build("grounding_dino", str(published))
    assert len(caught.value.complaints) == 1 and "weights_only" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["config.json", "processor_config.json", "tokenizer_config.json"])
def test_code_in_a_folder_is_never_run(folders, published, tmp_path, file):
    """Neither where transformers itself has the class nor where only the folder would have it."""
    shutil.copy(folders["grounding_dino"] / "model.safetensors", published)
    (published / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nclass Own: pass\n")
    classes = ["AutoConfig", "AutoModel", "AutoModelForZeroShotObjectDetection", "AutoProcessor", "AutoImageProcessor"]
    content = json.loads((published / file).read_text())
    content["auto_map"] = {name: "own.Own" for name in classes} | {"AutoTokenizer": ["own.Own", "own.Own"]}
    if file == "processor_config.json":
        content["processor_class"] = "Own"
    (published / file).write_text(json.dumps(content))
    try:
        build("grounding_dino", str(published))
    except ConfigurationError as error:
        assert file == "processor_config.json" and "cannot be loaded" in str(error)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("nested", [False, True])
def test_a_kernel_from_elsewhere_is_refused(folders, published, nested):
    """transformers would fetch it and import it."""
    shutil.copy(folders["grounding_dino"] / "model.safetensors", published)
    config = json.loads((published / "config.json").read_text())
    (config["text_config"] if nested else config)["_attn_implementation"] = "someone/kernel"
    (published / "config.json").write_text(json.dumps(config))
    (complaint,) = check("grounding_dino", str(published))
    assert "_attn_implementation=someone/kernel" in complaint and "never run" in complaint
