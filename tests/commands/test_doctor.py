"""gdino-lab doctor, once, on whatever machine this is."""

from __future__ import annotations

import time

import pytest
from rich.text import Text

from gdino_lab.commands.doctor import row_of
from gdino_lab.doctor import Finding

SUBJECTS = [
    "Python", "packages", "torch", "CPU dtypes", "host memory", "/dev/shm", "/dev/shm leftovers", "pinned memory",
    "C++ compiler", "nvcc", "ninja", "DeepSpeed", "operators", "TORCH_CUDA_ARCH_LIST", "open files", "threads", "hub",
    "disk",
]  # fmt: skip


@pytest.mark.slow
def test_doctor_says_all_in_time(gdino, tmp_path):
    start = time.monotonic()
    ended = gdino("doctor", COLUMNS="160")
    assert time.monotonic() - start < 60  # 10 s where nothing else runs
    lines = [line for line in ended.out.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in line.split("│")[1:5]] for line in lines]
    verdicts = {what: verdict for what, verdict, _, _ in rows if what}
    assert set(verdicts) >= set(SUBJECTS), ended.out + ended.err
    assert set(verdicts.values()) <= {"ok", "warning", "problem"}
    assert ended.code == ("problem" in verdicts.values()), ended.out
    for _, verdict, found, cure in rows:
        assert found or not verdict
        assert cure if verdict in ("warning", "problem") else True
    assert "Traceback" not in ended.out + ended.err
    assert list(tmp_path.iterdir()) == []


def test_long_findings_are_folded_and_not_taken_for_markup():
    subject, verdict, found, cure = row_of(Finding("x", "warning", "a [bold] word " * 10, "kill 1"), room=60)
    assert (subject, verdict.plain, cure.plain) == ("x", "warning", "kill 1")
    assert isinstance(found, Text) and "[bold]" in found.plain
    assert max(map(len, found.plain.splitlines())) <= 36
