"""The program's front door: help, unknown words, refusals in one message, completion, synthesize."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gdino_lab.commands.main import COMMANDS, main, overrides_last
from tests.conftest import SMALL


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """main(words) in an empty folder -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gdino-lab"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("words", [(), ("--help",), ("train", "--help")], ids=" ".join)
def test_help_shows_groups_presets_and_three_examples(call, words):
    code, out, _ = call(*words)
    assert code == 0
    for shown in ("hardware: ", "rtx3090_single", "zero: stage0", "experiment/blog: ", "final_single_fp32", "nano"):
        assert shown in out
    assert sum(line.startswith("gdino-lab train") for line in out.splitlines()) == 3
    if words != ("train", "--help"):
        for command, text in COMMANDS.items():
            assert any(line.split(maxsplit=1) == [command, text] for line in out.splitlines())


def test_unknown_command_lists_the_commands(call):
    code, _, err = call("trian")
    assert code == 2
    assert "Did you mean 'train'?" in err and all(command in err for command in COMMANDS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.epcohs=3"], "train.epcohs"),
        (["zero.stag=2"], "zero.stag"),
        (["zero=stage9"], "stage0 stage1 stage2 stage3"),
        (["data.foo=3"], "data.foo"),
        (["train.epochs=three"], "train.epochs"),
        (["experiment=blog/final"], "final_single_fp32"),
        (["train.micro_batch=3", "train.effective_batch=8"], "the nearest that is: 6 or 9"),
        (["train.effective_batch=16"], "more than the 12 training images"),
        (["task=anomaly", "data=synthetic_detection"], "AnomalyTask takes data=synthetic_loco or mvtec_loco"),
        (["task=detection", "data=synthetic_loco"], "DetectionTask takes data=coco, odvg or synthetic_detection"),
        (["hardware=cpu", "hardware.devices=4096"], "this machine has"),
        (["hardware=rtx3090_single"], "0 CUDA device(s); hardware=cpu trains without a GPU"),
        (["offload=optimizer_and_params", "zero=stage2"], "only ZeRO-3"),
        (["precision=fp16", "zero=stage1"], "fp16 on hardware.device=cpu"),
        (["train.resume=."], "neither a checkpoint"),
        (["train.resume=nowhere"], "no such folder"),
        (["data=mvtec_loco", "data.root=nowhere", "data.image_size=64"], "data.root=nowhere: no such folder"),
        (["data.preset=eazy"], "Did you mean 'easy'?"),
        (["data.image_size=8"], "data.image_size=8"),
        (["task.edit_shares.clean=0.9"], "task.edit_shares sum to"),
        (["model=grounding_dino_tiny"], "hf download IDEA-Research/grounding-dino-tiny"),
        (["model.pretrained=nowhere"], "model.pretrained=nowhere"),
        (["train.epohcs=3"], "train.epohcs: no such key. Did you mean 'train.epochs'?"),
        (["+train.epohcs=3"], "train.epohcs: no such key. Did you mean 'train.epochs'?"),
        (["+trainn.epochs=3"], "trainn: no such key. Did you mean 'train'?"),
        (["optimizer.betaz=3"], "optimizer.betaz: no such key"),
        (["train.resume_allow=precision"], "train.resume_allow: takes a list, train.resume_allow=[...,...]"),
        (["+model.config.d_modl=32"], "Did you mean 'd_model'?"),
        (["+tuning.rank=3"], "tuning.rank"),
        (["optimizer._target_=os.system"], "optimizer._target_=os.system"),
        (["model=grounding_dino_tiny", "model.pretrained=null"], "fewer than the 900 queries"),
        (["tuning.freeze=[nonsense]"], "'nonsense' is found in no parameter's name"),
        (["tuning.lr_factors={nonsense: 0.1}"], "tuning.lr_factors: 'nonsense' is found"),
        (["tuning=lora", "tuning.target_modules=[qeury]"], "Did you mean 'query'?"),
        (["task=detection", "tuning=frozen"], "leaves no parameter to train"),
        (["task=detection", "task.loss_weights.class=x"], "task.loss_weights.class=x: allowed is a number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusal_is_one_message_and_leaves_nothing(call, tmp_path: Path, words, said):
    set_words = ["data.counts={train: 12, validation: 4, test_good: 4, test_logical: 4, test_structural: 4}"]
    if words[0].startswith("data=mvtec") or {"data=synthetic_detection", "task=detection"} & set(words):
        set_words = []
    code, out, err = call("train", *set_words, *words)
    assert code == 2, out + err
    assert said in err, err
    assert err.startswith("gdino-lab: refused, nothing was started\n")
    assert "Traceback" not in err + out
    assert list(tmp_path.iterdir()) == []


def test_all_complaints_come_in_one_message(call):
    _, _, err = call("train", "data.preset=eazy", "train.resume=nowhere", "hardware=rtx3090_single")
    # What the settings contradict comes first; what needs the machine and the data is asked only of sound settings.
    assert "train.resume" in err
    _, _, err = call("train", "data.preset=eazy", "hardware=rtx3090_single", "task.top_fraction=7", "model.pretrained=no")
    assert len([line for line in err.splitlines() if line.startswith("  - ")]) == 4


def test_a_key_that_an_experiment_file_misspells_is_refused(call, tmp_path: Path):
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "odd.yaml").write_text("# @package _global_\ntrain:\n  epoch: 3\n")
    code, _, err = call("train", "--config-dir", str(tmp_path / "mine"), "experiment=odd")
    assert code == 2 and "epoch" in err and "Traceback" not in err


def test_a_users_own_choice_is_found(call, tmp_path: Path):
    folder = tmp_path / "mine" / "hardware"
    folder.mkdir(parents=True)
    (folder / "shed.yaml").write_text("device: cpu\ndevices: 1\nmemory_gib: null\nmemory_limit_gib: null\n")
    code, out, _ = call("train", "--config-dir", str(tmp_path / "mine"), "hardware=shed", "--cfg", "job")
    assert code == 0 and "devices: 1" in out


def test_a_broken_yaml_file_is_refused(call, tmp_path: Path):
    folder = tmp_path / "mine" / "hardware"
    folder.mkdir(parents=True)
    (folder / "shed.yaml").write_text("device: cpu: cuda\n")
    code, _, err = call("train", "--config-dir", str(tmp_path / "mine"), "hardware=shed")
    assert code == 2 and "shed.yaml" in err and "Traceback" not in err


def test_overrides_may_stand_on_both_sides_of_a_flag():
    assert overrides_last(["a=1", "-m", "b=2,3"]) == ["-m", "a=1", "b=2,3"]
    assert overrides_last(["data.root=/März/a b"]) == ["data.root='/März/a b'"]
    for key in ("run", "train.resume", "train.resume_weights"):  # as a sweep calls its folders
        assert overrides_last([f"{key}=s/0_a=1,b=2"]) == [f"{key}='s/0_a=1,b=2'"]
    assert overrides_last(["data.root=a,b", "run_dir=plain/x-1"]) == ["data.root=a,b", "run_dir=plain/x-1"]
    assert overrides_last(["a=1", "--config-path", "out/0_a=1", "~b"]) == ["--config-path", "out/0_a=1", "a=1", "~b"]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("gdino-lab tr", {"train"}),
        ("gdino-lab ", set(COMMANDS)),
        ("gdino-lab train zero=", {"zero=stage0", "zero=stage1", "zero=stage2", "zero=stage3"}),
        ("gdino-lab train hardware=rtx3", {"hardware=rtx3090_single", "hardware=rtx3090_dual"}),
        ("gdino-lab train preci", {"precision=", "precision."}),
        ("gdino-lab train train.ep", {"train.epochs="}),
    ],
)
def test_completion_completes_commands_groups_and_choices(call, monkeypatch, line, offered):
    monkeypatch.setenv("COMP_LINE", line)
    code, out, _ = call("-sc", "query=bash")
    assert code == 0 and set(out.split()) == offered


def test_bash_completes(tmp_path: Path):
    """What `eval "$(gdino-lab --shell-completion install=bash)"` sets up, in a real bash."""
    program = Path(sys.executable).parent / "gdino-lab"
    script = (
        f'export PATH="{program.parent}:$PATH"; eval "$(gdino-lab --shell-completion install=bash)"; '
        'COMP_LINE="gdino-lab train zero=" COMP_POINT=21 COMP_CWORD=2; hydra_bash_completion; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.split() == ["zero=stage0", "zero=stage1", "zero=stage2", "zero=stage3"], done.stderr


def test_synthesize_writes_the_layout_and_says_where(call, tmp_path: Path):
    words = [word for word in SMALL if word.startswith(("data.canvas", "data.counts"))]
    code, out, _ = call("synthesize", "out=a bäg", *words, "data.preset=hard", "data.seed=3")
    assert code == 0 and "a bäg" in out
    folder = tmp_path / "a bäg" / "screw_bag"
    assert len(list((folder / "train" / "good").iterdir())) == 16
    assert (folder / "defects_config.json").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "out is missing"), (["out=x", "data=mvtec_loco"], "only a synthetic set"), (["out=x", "data.preset=no"], "data.preset=no")],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_synthesize_refuses(call, tmp_path: Path, words, said):
    code, _, err = call("synthesize", *words)
    assert code == 2 and said in err and list(tmp_path.iterdir()) == []
