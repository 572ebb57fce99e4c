"""Starts `gdino-lab` often and fast: what it imports is imported once, each start is a fork, a launcher's only rank or one of
two.

    python tests/forking.py      under `unshare -rm` where file systems are to be mounted; reads requests from stdin, a line of
                                 JSON each, answers with the exit codes
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import gdino_lab.finished  # noqa: F401  imports the rest
import gdino_lab.trainer  # noqa: F401
from gdino_lab.commands.main import main


def start(asked: dict, rank: int, port: int) -> int:
    """The process id of a rank."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.chdir(asked["folder"])
        said = os.open(f"said_{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(asked["ranks"])}
        os.environ |= {"LOCAL_WORLD_SIZE": str(asked["ranks"]), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        exec(asked["deed"], {})
        code = main(asked["words"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        shell = {"shell": True, "check": True, "cwd": asked["folder"]}
        subprocess.run(asked["before"], **shell)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        children = [start(asked, rank, port) for rank in range(asked["ranks"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        subprocess.run(asked["after"], **shell)
        said = [(Path(asked["folder"]) / f"said_{rank}").read_text() for rank in range(asked["ranks"])]
        print(json.dumps({"codes": codes, "said": said}), flush=True)


if __name__ == "__main__":
    serve()
