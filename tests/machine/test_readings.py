"""All of it, here."""

from __future__ import annotations

from gdino_lab.machine.readings import read_all


def test_a_rank_can_say_something_on_this_machine():
    found = read_all(None, on_device=False)
    assert 0 < found.host.available <= found.host.total and sum(found.host.processes.values()) > 2**20
    assert found.oom_kills is None and found.device is None and found.memlock is not None
