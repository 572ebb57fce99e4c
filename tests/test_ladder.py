"""A ladder's decisions: what a rung may change, which need not be tried, how it ends; and the ladders there are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gdino_lab import ladder, launch
from gdino_lab.commands.main import composed, conf_folder
from gdino_lab.errors import ConfigurationError
from gdino_lab.ladder import Try
from gdino_lab.memory.forecast import Forecast, forecast
from gdino_lab.run_folder import RunFolder, new_run_folder, write_json
from gdino_lab.settings import Rung
from gdino_lab.tasks.protocol import Worst
from tests.conftest import SMALL

NAMES = sorted(path.stem for path in (conf_folder() / "ladder").glob("*.yaml"))
SEED = {
    "zero2_dual": "attempt1_zero2_dual",
    "zero3_dual_offload": "attempt2_zero3_dual_offload",
    "bucket_5mb": "attempt3_bucket_5mb",
    "bucket_1mb": "attempt4_bucket_1mb",
    "single_fp32": "final_single_fp32",
    "single_half_fp16": "attempt5_single_fp16",
    "single_half_bf16": "attempt6_single_bf16",
}


def tries_of(words: list[str], rungs: list[list[str]] | None = None) -> list[Try]:
    base = composed(*words)
    if rungs is not None:
        base.ladder.rungs = [Rung(f"rung{number}", overrides) for number, overrides in enumerate(rungs, start=1)]
    return ladder.tries_of(base, lambda overrides: composed(*ladder.merged(words, overrides)))


def predicted(peak: int, limit: int | None = 100) -> Forecast:
    terms = {"device": {"weights": peak}, "host": {}, "peak": peak, "micro_batch": 1, "limit": limit}
    known = set(Forecast.__dataclass_fields__)
    return Forecast(**terms, worst=Worst(8, 8, 4, 0), **{name: 0 for name in known - set(terms) - {"worst"}})


def ended(number: int, outcome: str, code: int | None, peak: int | None = None, kind: str = "") -> Try:
    made = Try(number, f"rung{number}", [], composed(), outcome=outcome, code=code, kind=kind, verdict=outcome)
    made.predicted = None if peak is None else predicted(peak)
    return made


# --- composing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hardware", ["cpu", "rtx3090_dual", "h200_single"])
def test_every_ladder_composes_and_keeps_what_is_trained(name: str, hardware: str):
    words = [f"ladder={name}", f"hardware={hardware}", "train.effective_batch=8"]
    base, tries = composed(*words), tries_of(words)
    assert len({rung.name for rung in tries}) == len(tries) > 5
    for rung in tries:
        if rung.settings is None:
            assert hardware == "cpu" and "fp16" in rung.verdict
            continue
        assert rung.settings.train.effective_batch == base.train.effective_batch
        assert rung.settings.optimizer == base.optimizer and rung.settings.data == base.data
        assert rung.settings.hardware.memory_limit_gib == base.hardware.memory_limit_gib


def test_the_blog_ladder_holds_the_seeds_attempts():
    tries = {rung.name: rung for rung in tries_of(["ladder=blog", "experiment=blog/attempt1_zero2_dual"])}
    for name, experiment in SEED.items():
        theirs = composed(f"experiment=blog/{experiment}")
        assert not ladder.differences(theirs, tries[name].settings), name


def test_a_rung_wins_over_presets_and_the_command_line():
    words = ["hardware=rtx3090_single", "zero.stage=1", "train.micro_batch=4", "++offload.pin_memory=false", "seed=1"]
    rung = ["zero=stage3", "train.micro_batch=1", "offload=none"]
    assert ladder.merged(words, rung) == ["hardware=rtx3090_single", "seed=1", *rung]
    (made,) = tries_of(["hardware=rtx3090_single", "zero.stage=1"], [["zero=stage3"]])
    assert made.settings.zero.stage == 3 and made.changed == {"zero.stage": 3}


def test_a_rung_that_would_train_something_else_is_refused():
    rungs = [["zero=stage2"], ["train.effective_batch=4"], ["optimizer.lr=1", "data.image_size=64"], ["train.epochs=1"]]
    with pytest.raises(ConfigurationError) as refused:
        tries_of(["run_dir=x"], rungs)
    said = "\n".join(refused.value.complaints)
    for key in ("run_dir", "rung2: changes train.effective_batch", "optimizer.lr", "data.image_size", "train.epochs"):
        assert key in said
    assert "rung1" not in said


def test_an_empty_ladder_and_a_resume_are_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError) as refused:
        tries_of([f"train.resume={tmp_path}"], [])
    assert len(refused.value.complaints) == 2


def test_a_rung_whose_settings_contradict_each_other_is_skipped():
    tries = tries_of([], [["offload=optimizer_and_params", "zero=stage2"], ["zero=stage1"]])
    assert tries[0].verdict.startswith("skipped: refused, offload.parameters=true with zero.stage=2")
    assert tries[1].outcome == ""


# --- deciding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("peak", "limit", "skipped"), [(104, 100, False), (106, 100, True), (10**9, None, False)])
def test_only_a_prediction_beyond_its_error_is_believed(peak, limit, skipped):
    assert (ladder.too_large(predicted(peak, limit)) is not None) == skipped


def test_what_needs_no_less_than_what_ran_out_is_not_tried():
    out = ended(1, "out_of_memory", 3, peak=50, kind="out_of_memory")
    elsewhere = ended(1, "out_of_memory", 3, peak=50, kind="device_memory_taken")
    for peak, skipped in ((49, False), (50, True)):
        rung = ended(2, "", None)
        assert (ladder.no_smaller(predicted(peak), rung, [out, rung]) is not None) == skipped
        assert ladder.no_smaller(predicted(peak), rung, [elsewhere, rung]) is None
        rung.settings = replace(rung.settings, hardware=replace(rung.settings.hardware, devices=2))
        assert ladder.no_smaller(predicted(peak), rung, [out, rung]) is None


@pytest.mark.parametrize(
    ("code", "status", "steps", "outcome", "verdict"),
    [
        (0, {"state": "completed"}, 4, "trained", "trained"),
        (3, {"state": "out_of_memory", "kind": "out_of_memory"}, 0, "out_of_memory", "out of memory before the first step"),
        (3, {"state": "out_of_memory", "kind": "host_memory"}, 7, "out_of_memory",
         "out of memory (host memory) after step 7, the next rung starts afresh"),
        (1, {"state": "failed", "kind": "other", "cause": "KeyError: 'nut'"}, 0, "failed", "failed: KeyError: 'nut'"),
        (130, {"state": "interrupted", "cause": "asked to stop"}, 2, "interrupted", "interrupted: asked to stop"),
    ],
)  # fmt: skip
def test_verdicts(code, status, steps, outcome, verdict):
    assert ladder.verdict_of(code, status, steps) == (outcome, verdict)


@pytest.mark.parametrize(
    ("tries", "code", "said"),
    [
        ([("skipped", None, 9), ("out_of_memory", 3, 5), ("trained", 0, 3), ("", None, None)], 0, "trained on rung 3"),
        ([("skipped", None, 9), ("skipped", None, None)], 3, "none of the 2 rungs fits"),
        ([("out_of_memory", 3, 9)], 3, "none of the 1 rungs fits"),
        ([("skipped", None, None)], 2, "could be tried"),
        ([("out_of_memory", 3, 9), ("failed", 1, 5), ("", None, None)], 1, "stopped at rung 2"),
        ([("interrupted", 130, 9), ("", None, None)], 130, "stopped at rung 1"),
    ],
)
def test_endings(tries, code, said):
    made = [ended(number, *each) for number, each in enumerate(tries, start=1)]
    assert ladder.exit_code(made) == code
    assert said in ladder.ending(made)


def test_the_table_tells_changes_prediction_measurement_and_verdict():
    tries = tries_of([], [["train.micro_batch=4"], ["train.micro_batch=2", "zero=stage1"], ["zero=stage1", "train.micro_batch=2"]])
    tries[0].predicted, tries[0].measured_bytes, tries[0].verdict = predicted(3 * 2**30), 2**30, "out of memory"
    tries[1].predicted, tries[1].measured_bytes, tries[1].outcome, tries[1].verdict = predicted(2**30), 2**29, "trained", "trained"
    assert ladder.rows_of(tries) == [
        ["1 rung1", "train.micro_batch=4", "3.00", "> 1.00", "out of memory"],
        ["2 rung2", "zero.stage=1 train.micro_batch=2", "1.00", "0.50", "trained"],
        ["3 rung3", "nothing", "-", "-", "not tried"],
    ]


def test_measured_is_the_peak_of_the_rank_that_took_most(tmp_path: Path):
    folder: RunFolder = new_run_folder(str(tmp_path / "run"), "anomaly", "synthetic_loco")
    folder.write_status("out_of_memory", figures={"peak_allocated_bytes": 7})
    folder.append_metrics({"kind": "step", "step": 3})
    folder.append_metrics({"kind": "epoch", "step": 4})
    assert (ladder.measured(folder), ladder.steps_taken(folder)) == (7, 3)
    write_json(folder.summary, {"peak_bytes": [{"allocated": 5}, {"allocated": 9}]})
    assert ladder.measured(folder) == 9
    write_json(folder.summary, {"peak_bytes": None})
    assert ladder.measured(folder) is None


# --- climbing -------------------------------------------------------------------------------------------------------


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs that only pretend: `endings[name of the rung's folder]` or else trained. Returns the dict to fill."""
    endings: dict[str, tuple[int, str]] = {}

    def train(settings, run_dir: str) -> int:
        folder = new_run_folder(run_dir, "anomaly", "synthetic_loco")
        code, kind = endings.get(folder.path.name, (0, ""))
        folder.write_status(launch.STATE_OF_EXIT[code], kind=kind, cause="pretended")
        return code

    monkeypatch.setattr(launch, "train", train)
    monkeypatch.chdir(tmp_path)
    return endings


def climbed(words: list[str], rungs: list[list[str]] | None = None) -> tuple[int, dict]:
    base = composed(*words, "out=climbed")
    if rungs is not None:
        base.ladder.rungs = [Rung(f"rung{number}", overrides) for number, overrides in enumerate(rungs, start=1)]
    code = ladder.climb(base, lambda overrides: composed(*ladder.merged(words, overrides)))
    return code, json.loads(Path("climbed/ladder.json").read_text())


@pytest.mark.slow
def test_climbing(pretended: dict, small_set: Path):
    pretended["03_rung3"] = (3, "out_of_memory")
    rungs = [
        ["hardware.devices=4096"], ["hardware.memory_limit_gib=0.001"], ["train.micro_batch=4"], ["precision=fp32", "train.micro_batch=4"],
        ["train.micro_batch=3"], ["train.micro_batch=1"], ["activations=recompute"],
    ]  # fmt: skip
    code, found = climbed([*SMALL, f"data.root={small_set}"], rungs)
    assert code == 0 and found["trained"] == "rung6"
    verdicts = [rung["verdict"] for rung in found["rungs"]]
    for verdict, said in zip(verdicts, (
        "skipped: refused, hardware.devices=4096: this machine has", "skipped: predicted too large", "out of memory",
        "skipped: the same settings as rung 3", "skipped: refused, train.effective_batch=4 is not a multiple", "trained", "not tried",
    ), strict=True):  # fmt: skip
        assert verdict.startswith(said), verdict
    assert {path.name for path in Path("climbed").iterdir()} == {"ladder.json", "03_rung3", "06_rung6"}
    assert found["rungs"][5]["predicted"]["peak"] > 0 and found["rungs"][5]["folder"] == "06_rung6"


def test_what_is_no_lack_of_memory_ends_the_ladder(pretended: dict, small_set: Path):
    pretended["01_rung1"] = (1, "other")
    code, found = climbed([*SMALL, f"data.root={small_set}"], [["train.micro_batch=4"], ["train.micro_batch=1"]])
    assert code == 1 and [rung["outcome"] for rung in found["rungs"]] == ["failed", ""]


def test_none_fits(pretended: dict, small_set: Path, capsys):
    words = [*SMALL, f"data.root={small_set}", "hardware.memory_limit_gib=0.001"]
    code, found = climbed(words, [["train.micro_batch=4"], ["train.micro_batch=1"]])
    assert code == 3 and found["trained"] is None
    assert all(rung["verdict"].startswith("skipped: predicted too large") for rung in found["rungs"])
    assert [path.name for path in Path("climbed").iterdir()] == ["ladder.json"]
    assert "none of the 2 rungs fits" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.slow
def test_the_blog_ladder_ends_on_four_rungs_under_four_caps(pretended: dict, monkeypatch, small_set: Path):
    """By prediction, on one GPU, with images of the seed's size."""
    monkeypatch.setattr(ladder, "forecast", lambda settings, task, _, ranks: forecast(settings, task, Worst(800, 1164, 15, 0), ranks))
    monkeypatch.setattr(ladder, "KNOWN_ERROR", 0.0)  # these runs only pretend, so nothing runs out of memory
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 1)
    words = [
        "ladder=blog", "experiment=blog/attempt1_zero2_dual", "data=synthetic_loco", *SMALL, f"data.root={small_set}",
        "data.image_size=[800,1333]", "model.pretrained=null",
    ]  # fmt: skip
    trained = []
    for cap in (12, 8, 5, 3.5):
        code, found = climbed([*words, f"hardware.memory_limit_gib={cap}"])
        assert code == 0
        trained.append(next(rung["number"] for rung in found["rungs"] if rung["outcome"] == "trained"))
        Path("climbed").rename(f"climbed_{cap}")
    assert trained == sorted(set(trained))
