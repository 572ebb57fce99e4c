"""The anomaly task: samples that depend on nothing but their place, scores by the protocol, several categories."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from gdino_lab.data.loco import GOOD, LOGICAL, STRUCTURAL, LocoData
from gdino_lab.data.synthetic.screw_bag import BagCounts, write_screw_bags
from gdino_lab.errors import ConfigurationError
from gdino_lab.models.grounding_dino import random_weights_processor
from gdino_lab.tasks.anomaly import EDITED, SUMMED, TEST, TRAIN, VALIDATION, AnomalyTask
from gdino_lab.tasks.protocol import Evaluation

SHARES = {"clean": 0.25, "identity": 0.25, "logical": 0.25, "structural": 0.25}
WEIGHTS = {"global": 1.0, "top": 1.0, "focal": 1.0, "dice": 1.0, "parts": 1.0}
PROMPT = {"screw_bag": ["long screw", "nut"], "bag_two": ["washer"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    write_screw_bags(folder, preset="easy", seed=0, canvas=(48, 64), counts=BagCounts(8, 4, 3, 3, 3))
    shutil.copytree(folder / "screw_bag", folder / "bag_two")
    return folder


def task_on(root: Path, category: str | list[str] = "all", seed: int = 0) -> AnomalyTask:
    task = AnomalyTask(SHARES, 0.01, 3, WEIGHTS, seed)
    task.bind(LocoData(root, category, [48, 64], PROMPT), random_weights_processor())
    return task


def test_a_sample_depends_on_seed_epoch_and_index_alone(root):
    first, again = task_on(root).train_set(), task_on(root).train_set()
    kinds = set()
    for index in range(len(first)):
        one, two = first[(3, index)], again[(3, index)]
        assert torch.equal(one.pixels, two.pixels) and torch.equal(one.kinds, two.kinds) and one.kind == two.kind
        kinds.add(one.kind)
    assert kinds == {GOOD, LOGICAL, STRUCTURAL}
    other = task_on(root, seed=1).train_set()
    assert any(not torch.equal(first[(3, i)].pixels, first[(4, i)].pixels) for i in range(8))
    assert any(not torch.equal(first[(3, i)].pixels, other[(3, i)].pixels) for i in range(8))


def test_evaluation_sees_test_images_as_they_are_and_edits_validation_only(root):
    task = task_on(root, "screw_bag")
    samples = [task.evaluation_set()[(0, index)] for index in range(len(task.evaluation_set()))]
    counts = {(s.subset, s.kind): 0 for s in samples}
    for sample in samples:
        counts[sample.subset, sample.kind] += 1
    assert counts == {
        (TRAIN, GOOD): 8, (VALIDATION, GOOD): 4, (EDITED, LOGICAL): 4, (EDITED, STRUCTURAL): 4,
        (TEST, GOOD): 3, (TEST, LOGICAL): 3, (TEST, STRUCTURAL): 3,
    }  # fmt: skip
    assert [sample.index for sample in samples] == list(range(len(samples)))
    assert torch.equal(samples[-1].pixels, task.evaluation_set()[(7, len(samples) - 1)].pixels)


def test_prompts_of_a_mixed_batch_are_closed_and_padded(root):
    task = task_on(root)
    data = task.train_set()
    batch = task.collate([data[(0, 0)], data[(0, len(data) - 1)]])  # one of each category
    ids, mask = batch["inputs"]["input_ids"], batch["inputs"]["attention_mask"]
    for row, tokens in zip(ids, mask, strict=True):
        assert row[tokens.bool()][-2:].tolist() == [1012, 102]  # '.' and the end
    assert batch["anomalous"].shape == batch["seen_locally"].shape == (2,)
    assert batch["changed"].shape == batch["kinds"].shape == batch["inputs"]["pixel_mask"].shape


def records_of(task: AnomalyTask, rng: np.random.Generator, shift: float) -> list[dict]:
    """Records as a model would leave them, anomalous images shifted by `shift`."""
    records = []
    for index in range(len(task.evaluation_set())):
        sample = task.evaluation_set()[(0, index)]
        up = shift * sample.anomalous
        records.append(
            {"index": index, "category": sample.category, "subset": sample.subset, "kind": sample.kind,
             "local": np.float32(30 + rng.normal() + up), "global": np.float32(rng.normal()),
             "features": (rng.normal(size=6) + up).astype(np.float32),
             "parts": (rng.normal(size=3) + up).astype(np.float32)}
        )  # fmt: skip
    return records


def test_scores_are_the_protocols_and_equal_scikit_learns(root):
    task = task_on(root, "screw_bag")
    records = records_of(task, np.random.default_rng(0), shift=1.0)
    found = task.evaluate(records)
    # Local scores are far outside [0, 1]; the AUROC must not care.
    test = [record for record in records if record["subset"] == TEST]
    for kind, name in ((LOGICAL, "logical"), (STRUCTURAL, "structural")):
        chosen = [record for record in test if record["kind"] in (GOOD, kind)]
        labels = [record["kind"] == kind for record in chosen]
        expected = roc_auc_score(labels, [record["local"] for record in chosen])
        assert found.metrics[f"auroc_local/{name}"] == pytest.approx(expected, abs=1e-9)
    for name in ("", *(f"_{score}" for score in SUMMED)):
        mean = (found.metrics[f"auroc{name}/logical"] + found.metrics[f"auroc{name}/structural"]) / 2
        assert found.metrics[f"auroc{name}/mean"] == pytest.approx(mean)
    assert found.selection == found.metrics["auroc_validation_edits/mean"]


def test_test_images_do_not_touch_the_selection(root):
    task = task_on(root, "screw_bag")
    records = records_of(task, np.random.default_rng(0), shift=1.0)
    before = task.evaluate(records).selection
    changed = [record | {"local": np.float32(-99)} if record["subset"] == TEST else record for record in records]
    assert task.evaluate(changed).selection == before


def test_several_categories_are_averaged_and_shown(root):
    task = task_on(root)
    found = task.evaluate(records_of(task, np.random.default_rng(1), shift=0.7))
    for column in ("logical", "structural", "mean", "pooled"):
        each = [found.metrics[f"auroc/{column}/{category}"] for category in task.data.categories]
        assert found.metrics[f"auroc/{column}"] == pytest.approx(np.mean(each))
    assert list(found.scores) == task.data.categories == ["bag_two", "screw_bag"]


def test_table_compares_tuned_with_every_other_row(root):
    task = task_on(root, "screw_bag")
    rng = np.random.default_rng(2)
    rows = {"tuned": task.evaluate(records_of(task, rng, 3.0)), "untuned": task.evaluate(records_of(task, rng, 0.0))}
    (table,) = task.tables(rows | task.baselines())
    assert [row[0] for row in table.rows] == ["tuned", "untuned", "random", "mean pixel", "foreground area", "blob count"]
    assert table.rows[0][-1] == "" and all("±" in row[-1] for row in table.rows[1:])
    gain = 100 * (rows["tuned"].metrics["auroc/mean"] - rows["untuned"].metrics["auroc/mean"])
    assert table.rows[1][-1].startswith(f"{gain:+.1f}")


def test_an_undefined_number_is_said_to_be():
    from gdino_lab.tasks.anomaly import percent

    assert percent(None) == "undefined" and percent(0.5) == "50.0"
    task = AnomalyTask(SHARES, 0.01, 3, WEIGHTS, 0)
    metrics = {f"auroc/{name}": None for name in ("logical", "structural", "mean", "pooled")}
    assert task.epoch_line(Evaluation(metrics, None)).count("undefined") == 5


@pytest.mark.parametrize(
    ("shares", "fraction", "kinds", "weights", "said"),
    [
        ({"clean": 0.5}, 0.01, 3, WEIGHTS, "sum to 0.5"),
        (SHARES | {"clear": 0.0}, 0.01, 3, WEIGHTS, "task.edit_shares.clear"),
        ({"clean": 2.0, "identity": -1.0}, 0.01, 3, WEIGHTS, "task.edit_shares.identity=-1.0"),
        (SHARES, 0.0, 3, WEIGHTS, "task.top_fraction=0.0"),
        (SHARES, 0.01, 0, WEIGHTS, "task.part_kinds=0"),
        (SHARES, 0.01, 3, {"focall": 1.0}, "task.loss_weights.focall"),
    ],
)
def test_refused(shares, fraction, kinds, weights, said):
    with pytest.raises(ConfigurationError, match=said):
        AnomalyTask(shares, fraction, kinds, weights, 0)
