"""gdino-lab COMMAND [hydra overrides and flags]: find the command, compose conf/ with Hydra, call it, say errors plainly."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from gdino_lab.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from gdino_lab.settings import Settings

COMMANDS = {
    "train": "fine-tune; -m sweeps",
    "plan": "batch arithmetic, DeepSpeed configuration and predicted memory, without starting anything",
    "ladder": "the rungs of ladder=NAME in turn, each in its own processes, training on the first that fits",
    "eval": "score a finished run again: run=DIR split=NAME",
    "export": "any checkpoint of a run as a transformers folder: run=DIR checkpoint=best|last|NAME",
    "predict": "boxes or anomaly maps on new images: run=DIR images=PATH",
    "blend": "weights between a run's start and its end, scored at each share: run=DIR alpha=0,0.5,1",
    "inspect": "one forward pass: every output field with name, shape, dtype, device and range",
    "doctor": "what this machine can do, and the cure for what it cannot",
    "synthesize": "write the synthetic screw-bag set in MVTec LOCO layout to out=DIR",
}
FAILED, REFUSED, INTERRUPTED = 1, 2, 130
FLAGS_WITH_VALUE = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--cfg", "-c", "--package", "-p")
PATHS = (
    "run_dir", "out", "run", "checkpoint", "images", "data.root", "model.pretrained", "train.resume", "task.guard",
    "task.guard_images", "train.resume_weights",
)  # fmt: skip
# Paths that no sweep runs over, so that a comma in one is a comma.
ONE_PATH = ("run", "images", "train.resume", "train.resume_weights")
# These start from a finished run's own configuration instead of conf/.
OF_A_RUN = ("eval", "export", "predict", "blend")
COMPLETION_FLAGS = ("-sc", "--shell-completion")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # `deepspeed --module gdino_lab` appends this to every rank's arguments; LOCAL_RANK says the same.
    arguments = [word for word in arguments if not re.fullmatch(r"--local[_-]rank(=\d+)?", word)]
    if arguments and arguments[0] in COMPLETION_FLAGS:
        return complete(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(commands_text())
        return run("train", ["--help"])
    command, *rest = overrides_last(arguments)
    if command not in COMMANDS:
        print(f"gdino-lab: unknown command '{command}'.{nearest(command, COMMANDS)}\n\n{commands_text()}", file=sys.stderr)
        return REFUSED
    return run(command, rest)


def run(command: str, arguments: list[str]) -> int:
    """Compose the configuration with Hydra and hand it to the command's `run(config) -> exit code`."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    import gdino_lab.settings  # noqa: F401  registers the schema

    body = importlib.import_module(f"gdino_lab.commands.{command}")
    folder = conf_folder()
    of_a_run = command in OF_A_RUN and not set(arguments) & {"--help", "-h"}
    if of_a_run:
        folder = next((Path(word[4:].strip("'")).resolve() for word in arguments if word.startswith("run=")), None)
        if folder is None or not (folder / "config.yaml").is_file():
            missing = "run is missing" if folder is None else f"run={folder}: holds no config.yaml, so it is no run"
            refuse([f"{missing}; allowed is the folder of a run, run=DIR"])
            return REFUSED
    codes: list[int] = []

    def call(config: DictConfig) -> None:
        # An exception would pass through Hydra, which prints a line of its own about it.
        try:
            codes.append(body.run(config))
        except ConfigurationError as error:
            refuse(error.complaints)
            codes.append(REFUSED)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come as exceptions, and are told here
    sys.argv = ["gdino-lab", *arguments]
    try:
        with own_header(folder) if of_a_run else nullcontext(folder) as composed:
            hydra.main(config_path=str(composed), config_name="config", version_base="1.3")(call)()
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        refuse([plain(error)])
        return REFUSED
    except ConfigurationError as error:
        refuse(error.complaints)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else FAILED
    return max(codes, default=0)


@contextmanager
def own_header(run: Path) -> Iterator[Path]:
    """A folder with the run's config.yaml alone and what every run says to Hydra: logging, callbacks and further files that
    somebody else's run names could be any code."""
    from omegaconf import OmegaConf

    from gdino_lab.settings import RUN_HEADER

    found = OmegaConf.load(run / "config.yaml")
    if not OmegaConf.is_dict(found):
        raise ConfigurationError(f"run={run}: its config.yaml holds no settings, so it is no run")
    values = {key: value for key, value in found.items() if key not in RUN_HEADER}
    with TemporaryDirectory() as folder:
        OmegaConf.save(OmegaConf.create(RUN_HEADER | values), Path(folder) / "config.yaml")
        yield Path(folder)


def overrides_last(words: list[str]) -> list[str]:
    """Flags first: argparse, and so Hydra, refuses overrides on both sides of a flag (`zero=stage2 -m train...`)."""
    flags, overrides = [], []
    for previous, word in zip(["", *words], words, strict=False):
        is_override = not word.startswith("-") and ("=" in word or word.startswith("~"))
        if is_override and previous not in FLAGS_WITH_VALUE:
            overrides.append(quoted(word))
        else:
            flags.append(word)
    return flags + overrides


def quoted(override: str) -> str:
    """Hydra's grammar wants quotes around what a path may well hold: spaces, '=', brackets, letters beyond ASCII.

    A comma is left alone, since it separates the values of a sweep, but in what is never swept.
    """
    key, sign, value = override.partition("=")
    if key == "alpha" and value[:1] != "[":
        return f"alpha=[{value}]"
    plain = re.fullmatch(r"[\w./:@%+~-]*", value, re.ASCII) is not None
    swept = "," in value and key not in ONE_PATH
    if key not in PATHS or plain or swept or value[:1] in "'\"[{":
        return override
    return f"{key}{sign}'{value}'"


def composed(*overrides: str) -> Settings:
    """The checked settings of `gdino-lab train OVERRIDES`, for scripts.

    Raises:
        ConfigurationError: with every complaint.
    """
    from hydra import compose, initialize_config_dir

    from gdino_lab import settings

    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return settings.load(compose("config", list(overrides)))


def conf_folder() -> Path:
    """conf/: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next(folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir())


def commands_text() -> str:
    width = max(map(len, COMMANDS))
    return "gdino-lab COMMAND [overrides and flags]\n\n" + "\n".join(
        f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()
    ) + "\n"


def refuse(complaints: list[str]) -> None:
    print("gdino-lab: refused, nothing was started", file=sys.stderr)
    for complaint in complaints:
        print(f"  - {complaint}", file=sys.stderr)


def plain(error: Exception) -> str:
    """Hydra's, OmegaConf's and YAML's messages in one line, with the nearest right spelling of an unknown key."""
    from gdino_lab.settings import no_such_key

    deepest = error
    while deepest.__cause__ is not None and "Error merging override" in str(deepest):
        deepest = deepest.__cause__
    text = str(deepest)
    key = re.search(r"full_key: (\S+)", text) or re.match(r"Could not override '([^']+)'", text)
    file = re.search(r"Could not find '([^']+)'", text)
    # What follows names Python types and search paths, which a user has no use for.
    message = " ".join(re.split(r"\s*(?:full_key|object_type|Config search path)", text)[0].split())
    if file is not None:
        files = conf_folder().rglob("*.yaml")
        return message + nearest(file[1], [str(path.relative_to(conf_folder()).with_suffix("")) for path in files])
    if key is None:
        return message
    if "not in" in message or "Could not override" in message:
        return no_such_key(key[1])
    if "is not a ListConfig" in message:
        return f"{key[1]}: takes a list, {key[1]}=[...,...]"
    return f"{key[1]}: {message}"


def complete(arguments: list[str]) -> int:
    """Shell completion: the command first, then what Hydra completes."""
    line = os.environ.get("COMP_LINE", "")
    if not line or "query=" not in arguments[-1]:
        return run("train", arguments)
    program, _, rest = line.partition(" ")
    command, space, overrides = rest.lstrip().partition(" ")
    if not space:
        print(" ".join(name for name in COMMANDS if name.startswith(command)))
        return 0
    os.environ["COMP_LINE"] = f"{program} {overrides}"
    return run("train", arguments)
