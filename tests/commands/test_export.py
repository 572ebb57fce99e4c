"""gdino-lab export: checkpoints of two ranks under ZeRO-3, of bf16 and of adapters become folders that transformers and peft
load, with the engine's own weights; and nothing that was slipped into one of them is run."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForZeroShotObjectDetection, AutoProcessor, PreTrainedModel

from gdino_lab.checkpoint_folder import write_bytes
from gdino_lab.commands.main import conf_folder, main
from gdino_lab.models.grounding_dino import build
from tests.conftest import SMALL, environment, read_json

pytestmark = pytest.mark.slow

TINY = [
    "task=detection", "tracker=none", "train.log_every=1", "train.micro_batch=2", "train.effective_batch=4",
    "data.image_size=[48,64]", "data.canvas=[48,64]", "data.counts={train: 8, val: 5}",
]  # fmt: skip
NANO = yaml.safe_load((conf_folder() / "model" / "nano.yaml").read_text())["model"]["config"]


def trained(place: Path, *words: str, ranks: int = 1) -> Path:
    """The folder of a run whose ranks are started as a launcher would, so that each loads everything once."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launcher = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "gdino_lab", "train", *words, "run_dir=run"], cwd=place,
            env=environment() | launcher | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    said = [each.communicate(timeout=240)[0] for each in started]
    assert all(each.returncode == 0 for each in started), "\n".join(said)
    return place / "run"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of two ranks under ZeRO-3, with a moving average."""
    words = ["hardware=cpu_dual", "zero=stage3", "train.max_steps=1", "train.ema_decay=0.5", "optimizer.lr=1e-2"]
    return trained(tmp_path_factory.mktemp("two"), *TINY, *words, ranks=2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model, as far as the program can tell."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(3)
    for part in build("grounding_dino", config=NANO):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """Three steps of adapters on it, a checkpoint after each."""
    words = ["tuning=lora", f"model.pretrained={base}", "train.max_steps=3", "train.save_every=1", "train.keep=9"]
    return trained(tmp_path_factory.mktemp("lora"), *TINY, *words, "optimizer.lr=3e-2", "train.epochs=2")


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory, small_set: Path) -> Path:
    """Weights in bf16, with copies in fp32 that ZeRO keeps; a task with heads of its own."""
    words = [f"data.root={small_set}", "precision=bf16", "zero=stage1", "train.max_steps=1"]
    return trained(tmp_path_factory.mktemp("half"), *SMALL, *words)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """main(words) in an empty folder, in this process -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gdino-lab"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    capsys.readouterr()

    def run(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        return code, *capsys.readouterr()

    return run


def loaded(folder: Path) -> PreTrainedModel:
    """In plain transformers, nothing missing and nothing left over."""
    model, report = AutoModelForZeroShotObjectDetection.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])]


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def answers(model: torch.nn.Module, folder: Path) -> torch.Tensor:
    processor = AutoProcessor.from_pretrained(folder, backend="pil")
    torch.manual_seed(0)
    batch = {"pixel_values": torch.randn(1, 3, 48, 64), "pixel_mask": torch.ones(1, 48, 64, dtype=torch.long)}
    with torch.no_grad():
        return model(**batch, **processor.tokenizer("nut . washer .", return_tensors="pt")).pred_boxes


# --- the weights ------------------------------------------------------------------------------------------------------


def test_two_ranks_under_zero3_give_the_engines_weights(two_ranks: Path, call, monkeypatch):
    """On one process; the moving averages, since they are what was evaluated and kept."""
    with monkeypatch.context() as forbidden:
        forbidden.setattr(PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))
        forbidden.setattr("gdino_lab.engine.build_engine", lambda *_, **__: pytest.fail("an engine was built"))
        code, out, err = call("export", f"run={two_ranks}")
    assert code == 0, err
    folder = two_ranks / "export" / "step_00000001"
    assert out.endswith(f"step_00000001, moving averages: {folder}\n")
    assert not differing(loaded(folder).state_dict(), loaded(two_ranks / "model").state_dict())
    others = {path.name for path in (two_ranks / "model").iterdir()} - {"model.safetensors"}
    assert {path.name for path in folder.iterdir()} == others | {"model.safetensors"}
    assert all((folder / name).read_bytes() == (two_ranks / "model" / name).read_bytes() for name in others)


def test_average_false_gives_the_weights_themselves(two_ranks: Path, call):
    code, out, err = call("export", f"run={two_ranks}", "average=false", "checkpoint=last", "out=raw")
    assert code == 0 and "step_00000001, weights: " in out, err
    raw, averaged = (loaded(folder).state_dict() for folder in (Path("raw"), two_ranks / "model"))
    torch.manual_seed(0)  # train.seed
    start = build("grounding_dino", config=NANO)[0].state_dict()
    moved = 0
    for name, weight in raw.items():
        if weight.is_floating_point():
            # After one step the average is the start's, and 1 - (1 + 1) / (10 + 1) of the way from there.
            expected = torch.lerp(start[name], weight, 9 / 11)
            torch.testing.assert_close(averaged[name], expected, rtol=1e-5, atol=1e-7)
            moved += not torch.equal(weight, averaged[name])
    assert moved > 100


def test_bf16_weights_are_the_engines_and_stay_bf16(half: Path, call):
    code, _, err = call("export", f"run={half}", "out=exported")
    assert code == 0, err
    exported, engines = loaded(Path("exported")).state_dict(), loaded(half / "model").state_dict()
    assert not differing(exported, engines) and torch.bfloat16 in {each.dtype for each in exported.values()}
    found, expected = contents(Path("exported")), contents(half / "model")
    assert "heads.safetensors" in found and found.keys() == expected.keys()
    # transformers chooses anew under which of its names a shared tensor is stored.
    assert {name for name in found if found[name] != expected[name]} <= {"model.safetensors"}
    detector, _ = build("grounding_dino", "exported")  # a start of further training
    assert detector.dtype == torch.float32


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_adapters_are_merged(lora: Path, call):
    code, _, err = call("export", f"run={lora}", "out=merged")
    assert code == 0, err
    assert not differing(loaded(Path("merged")).state_dict(), loaded(lora / "model").state_dict())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks transformers
def test_peft_loads_the_adapter_and_merges_to_the_same(lora: Path, base: Path, call):
    for words in (["out=adapter", "adapter=true"], ["out=merged"]):
        code, out, err = call("export", f"run={lora}", "checkpoint=last", *words)
        assert code == 0, err
        assert "adapter" not in words[0] or str(base) in out
    assert {"adapter_config.json", "adapter_model.safetensors", "task.safetensors"} <= {
        path.name for path in Path("adapter").iterdir()
    }
    model = loaded(base)
    assert "model.get_input_embeddings = model.model.text_backbone.get_input_embeddings" in Path("adapter/README.md").read_text()
    model.get_input_embeddings = model.model.text_backbone.get_input_embeddings
    adapted, merged = PeftModel.from_pretrained(model, "adapter").eval(), loaded(Path("merged"))
    without = answers(loaded(base), base)
    with_adapter, from_merged = answers(adapted, Path("adapter")), answers(merged, Path("merged"))
    assert (with_adapter - without).abs().max() > 1e-4
    torch.testing.assert_close(with_adapter, from_merged, rtol=0, atol=1e-5)
    assert not differing(adapted.merge_and_unload().state_dict(), merged.state_dict())


def test_each_checkpoint_can_be_asked_for(lora: Path, call):
    names = ["step_00000001", "step_00000003", str(lora / "checkpoints" / "step_00000002")]
    weights = []
    for name in names:
        code, out, err = call("export", f"run={lora}", f"checkpoint={name}")
        assert code == 0 and Path(name).name in out, err
        weights.append(loaded(lora / "export" / Path(name).name).state_dict())
    assert differing(weights[0], weights[1]) and differing(weights[1], weights[2])


def test_a_run_without_model_says_what_it_goes_without(lora: Path, call, tmp_path: Path):
    """One that was stopped in its first epoch: what describes the model is where the run found it."""
    shutil.copytree(lora, "stopped", symlinks=True, ignore=shutil.ignore_patterns("model", "export", "best"))
    code, out, err = call("export", "run=stopped", "checkpoint=last", "out=exported")
    assert code == 0 and "without the task's knowledge" in out, err
    assert not (tmp_path / "exported" / "task.safetensors").exists()
    assert call("export", f"run={lora}", "checkpoint=last", "out=other")[0] == 0
    assert not differing(loaded(Path("exported")).state_dict(), loaded(Path("other")).state_dict())


# --- what a user may get wrong ----------------------------------------------------------------------------------------


def test_refusals_are_one_message_and_leave_nothing(half: Path, lora: Path, call, tmp_path: Path):
    for words, said in [
        ([f"run={half}", "adapter=true"], "it was not tuning=lora"),
        ([f"run={lora}", "checkpoint=step_00000009"], "this run has best, last, step_00000003, "),
        ([f"run={lora}", "checkpoint=bets"], "Did you mean 'best'?"),
        ([f"run={lora}", "tuning.alpha=3"], "tuning.alpha was 16"),
        ([f"run={half}", f"checkpoint={lora / 'checkpoints' / 'last'}"], "tuning._target_ was"),
        ([f"run={lora}", f"out={lora}"], "holds something already"),
        (["run=nowhere"], "so it is no run"),
    ]:
        code, out, err = call("export", *words)
        assert code == 2 and said in err, (words, err)
        assert err.startswith("gdino-lab: refused") and "Traceback" not in out + err
        assert not list(tmp_path.iterdir())


# --- hostile files ----------------------------------------------------------------------------------------------------


class Hostile:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_the_hostile_pickle_works(tmp_path: Path):
    """Or the tests below would show nothing."""
    pickle.loads(pickle.dumps(Hostile(tmp_path / "ran")))
    assert (tmp_path / "ran").is_dir()


def pickled(path: Path, ran: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps(Hostile(ran)))


def archived(path: Path, ran: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    torch.save({"module": Hostile(ran)}, path)


def agree(checkpoint: Path) -> None:
    """The manifest says that all is as it should be."""
    manifest = read_json(checkpoint / "manifest.json")
    for name in manifest["files"]:
        content = (checkpoint / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_bytes(checkpoint / "manifest.json", [memoryview(json.dumps(manifest).encode())])


@pytest.mark.parametrize("put", [pickled, archived])
@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("state_0-000.safetensors", "state_0-000.safetensors: is no safetensors file"),
        ("state_1-000.safetensors", "state_1-000.safetensors: is not in the manifest"),
        ("trainer.json", "trainer.json: is no JSON"),
        ("manifest.json", "manifest.json: cannot be read"),
        ("engine/mp_rank_00_model_states.pt", None),
        ("optimizer.pt", None),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" not in value and ":" not in value else "",
)
def test_a_pickle_in_a_checkpoint_is_never_run(lora: Path, call, tmp_path: Path, put, name: str, refused: str | None):
    run = tmp_path / "run"
    shutil.copytree(lora, run, symlinks=True, ignore=shutil.ignore_patterns("export"))
    folder, ran = run / "checkpoints" / "step_00000003", tmp_path / "ran"
    put(folder / name, ran)
    if name != "manifest.json":
        agree(folder)
    code, _, err = call("export", f"run={run}", "checkpoint=step_00000003", "out=exported")
    assert not ran.exists()
    if refused is None:
        assert code == 0, err
        return
    uses = [
        ("checkpoint", code, err),
        ("train.resume", *call("train", "--config-path", str(run), f"train.resume={folder}")[::2]),
        ("train.resume_weights", *call("train", "--config-path", str(run), f"train.resume_weights={folder}")[::2]),
    ]
    for key, code, err in uses:
        assert code == 2 and f"{key}=" in err and refused in err, (key, err)
        assert "Traceback" not in err
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "outputs"} and not list(tmp_path.glob("outputs/runs"))
    assert not ran.exists()


def test_a_pickle_beside_a_runs_model_is_refused(lora: Path, call, tmp_path: Path):
    shutil.copytree(lora, tmp_path / "run", symlinks=True, ignore=shutil.ignore_patterns("export"))
    pickled(tmp_path / "run" / "model" / "task.safetensors", tmp_path / "ran")
    for command in ("export", "eval"):
        code, out, err = call(command, "run=run", "out=exported")
        assert code == 2 and "cannot be read" in err and "Traceback" not in out + err
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.mark.parametrize("put", [pickled, archived])
def test_a_model_folder_with_a_hostile_pickle_is_refused_before_anything_starts(base: Path, call, tmp_path: Path, put):
    shutil.copytree(base, tmp_path / "published", ignore=shutil.ignore_patterns("*.safetensors"))
    put(tmp_path / "published" / "pytorch_model.bin", tmp_path / "ran")
    code, out, err = call("train", *TINY, "model.pretrained=published")
    assert code == 2 and "pytorch_model.bin is no file of weights" in err and "Traceback" not in out + err
    assert {path.name for path in tmp_path.iterdir()} == {"published"}


@pytest.mark.parametrize("content", ["- 1", "a: [", "\x00"], ids=["list", "broken", "binary"])
def test_what_is_no_configuration_is_refused(call, tmp_path: Path, content: str):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(content)
    code, out, err = call("export", "run=run")
    assert code == 2 and "Traceback" not in out + err


def test_a_runs_configuration_is_settings_and_nothing_else(lora: Path, call, tmp_path: Path):
    """Hydra itself would let it name any function, among its logging, and further files."""
    run, ran = tmp_path / "run", tmp_path / "ran"
    shutil.copytree(lora, run, symlinks=True, ignore=shutil.ignore_patterns("export"))
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["defaults"] = ["settings", "_self_", "more"]
    logging = {"version": 1, "formatters": {"x": {"()": "os.mkdir", "path": str(ran)}}}
    config["hydra"]["job_logging"] = logging
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (run / "more.yaml").write_text("# @package _global_\n" + yaml.safe_dump({"hydra": {"hydra_logging": logging}}))
    code, _, err = call("export", f"run={run}", "out=exported")
    assert code == 0, err
    assert not ran.exists()
