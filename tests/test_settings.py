"""Every YAML file composes, every target binds, and what contradicts itself is refused, all of it at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from gdino_lab import settings
from gdino_lab.commands.main import composed, conf_folder
from gdino_lab.errors import ConfigurationError

CONF = conf_folder()
CHOICES = sorted(
    (str(path.parent.relative_to(CONF)), path.stem)
    for path in CONF.rglob("*.yaml")
    if path.parent != CONF and "hydra" not in path.parts
)
# Where one choice needs another.
COMPANIONS = {
    ("offload", "optimizer"): ["zero=stage1"],
    ("offload", "optimizer_and_params"): ["zero=stage3"],
    ("precision", "bf16"): ["zero=stage1"],
    ("precision", "fp16"): ["zero=stage1", "hardware=h200_single"],
    ("precision", "fp16_autocast"): ["hardware=h200_single"],
    ("precision", "tf32"): ["hardware=h200_single"],
}


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        composed(*overrides)
    return str(caught.value)


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_file_composes_and_binds(group: str, choice: str):
    name = f"{group.split('/', 1)[1]}/{choice}" if "/" in group else choice
    words = [f"{group.split('/')[0]}={name}", *COMPANIONS.get((group, choice), [])]
    if (group, choice) in (("tracker", "wandb"), ("tracker", "mlflow")):
        pytest.importorskip("accelerate.tracking")
    composed(*words)


@pytest.mark.parametrize(
    ("group", "choice"), [each for each in CHOICES if each[0].split("/")[0] in ("hardware", "experiment")]
)
def test_every_preset_opens_with_the_command_that_uses_it(group: str, choice: str):
    lines = (CONF / group / f"{choice}.yaml").read_text().splitlines()
    command = next(line for line in lines if "@package" not in line)
    assert command.startswith("# gdino-lab train ") and choice in command


def test_the_groups_are_those_of_the_interface():
    assert {group.split("/")[0] for group, _ in CHOICES} >= {
        "hardware", "zero", "offload", "bucket", "precision", "activations", "model", "tuning", "task", "data",
        "optimizer", "schedule", "tracker", "experiment",
    }  # fmt: skip


def test_the_seeds_last_command():
    """CUDA_VISIBLE_DEVICES=0 accelerate launch --num_processes 1 ... --epochs 20 --batch_size 1 --learning_rate 1e-5"""
    found = composed("experiment=blog/final_single_fp32", "hardware=cpu")
    assert (found.train.epochs, found.train.micro_batch, found.train.effective_batch) == (20, 1, 4)
    assert found.optimizer["lr"] == 1e-5 and found.precision.weights == "fp32" and found.precision.autocast is None
    assert (found.zero.stage, found.offload.optimizer, found.hardware.device) == (2, True, "cpu")
    assert found.data["category"] == "screw_bag" and "mvtec" in found.data["root"]


def test_hardware_selects_a_strategy_and_the_command_line_wins():
    found = composed("hardware=rtx3090_single")
    assert (found.zero.stage, found.offload.optimizer, found.train.micro_batch, found.train.effective_batch) == (2, True, 1, 4)
    assert (found.hardware.devices, found.hardware.memory_limit_gib) == (1, 24)
    found = composed("hardware=rtx3090_single", "zero=stage3", "train.micro_batch=2", "hardware.memory_limit_gib=8")
    assert (found.zero.stage, found.train.micro_batch, found.hardware.memory_limit_gib) == (3, 2, 8)


def test_seven_attempts_differ_as_the_seed_tells():
    def of(name: str):
        found = composed(f"experiment=blog/{name}")
        return found.hardware.devices, found.zero.stage, found.offload.parameters, found.bucket.megabytes, found.precision.weights

    assert of("attempt1_zero2_dual") == (2, 2, False, 500, "fp32")
    assert of("attempt2_zero3_dual_offload") == (2, 3, True, 500, "fp32")
    assert of("attempt3_bucket_5mb") == (2, 3, True, 5, "fp32")
    assert of("attempt4_bucket_1mb") == (2, 3, True, 1, "fp32")
    assert of("attempt5_single_fp16") == (1, 2, False, 50, "fp16")
    assert of("attempt6_single_bf16") == (1, 2, False, 50, "bf16")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["offload=optimizer_and_params", "zero=stage2"], "only ZeRO-3 can offload parameters"),
        (["offload=optimizer"], "use zero=stage1 or higher"),
        (["precision=fp16", "zero=stage1"], "fp16 on hardware.device=cpu"),
        (["precision=tf32"], "a mode of NVIDIA GPUs"),
        (["activations=recompute", "zero=stage3", "tuning=lora"], "does not gather the frozen parameters"),
        (["precision=bf16", "precision.autocast=bf16", "zero=stage1"], "autocast is for fp32 weights"),
        (["precision.weights=fp8"], "allowed are fp32, bf16, fp16"),
        (["train.epochs=0"], "train.epochs=0: allowed is 1 or more"),
        (["train.seed=-1"], "train.seed=-1"),
        (["train.resume=/nowhere"], "train.resume=/nowhere: no such folder"),
        (["schedule.name=cosin"], "Did you mean 'cosine'?"),
        (["schedule.warmup_fraction=1.5"], "allowed is 0 to 1"),
        (["optimizer.lr=-1"], "optimizer.lr=-1"),
        (["hardware.memory_limit_gib=0"], "hardware.memory_limit_gib=0"),
        (["bucket.megabytes=0"], "bucket.megabytes=0"),
        (["zero.stage=4"], "zero.stage=4: allowed are 0, 1, 2, 3"),
        (["+optimizer.learning_rat=1"], "optimizer.learning_rat: torch.optim.AdamW has no such argument"),
        (["~data.prompt"], "data.prompt is missing"),
        (["data._target_=builtins.open"], "data._target_=builtins.open: allowed are names below"),
        (["data._target_=torch.load"], "allowed are names below"),
        (["data._target_=gdino_lab.checkpoint_folder.os.system"], "and this is another's"),
        (["data._target_=gdino_lab.checkpoint.shutil.rmtree"], "and this is another's"),
        (["+data.prompt.x={_target_: gdino_lab.checkpoint_folder.os.system}"], "data.prompt.x._target_: allowed is data._target_ alone"),
        (["optimizer._target_=torch.optim.AdamX"], "cannot be found"),
        (["task._target_=gdino_lab.nothing.Task"], "cannot be found"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused(words: list[str], said: str):
    assert said in refusal(*words)


def test_all_complaints_come_at_once():
    said = refusal("train.epochs=0", "offload=optimizer_and_params", "optimizer.lr=-1", "+tuning.rank=3")
    assert len(said.splitlines()) >= 4


def test_schema_is_registered_under_the_name_the_config_uses():
    assert "settings.yaml" in ConfigStore.instance().list("")


def test_settings_survive_the_way_to_the_ranks():
    found = composed("hardware=cpu_dual", "tuning=lora")
    plain = settings.as_dict(found)
    again = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(settings.Settings), plain))
    assert again == found


def test_no_yaml_computes():
    """Every derived number is derived in the plan."""
    for path in CONF.rglob("*.yaml"):
        assert "${eval" not in path.read_text() and "${oc.env" not in path.read_text(), path


def test_conf_lies_beside_the_package_or_in_it():
    assert (CONF / "config.yaml").is_file() and Path(settings.__file__).is_file()
