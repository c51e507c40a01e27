"""Entry point of a worker process, `python -m moesaic_lab.fuzz.worker`.

Atheris instruments Moesaic's modules as they are imported. Therefore nothing at the top of this file imports one.
"""

from __future__ import annotations

import json
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path


def main(words: list[str]) -> None:
    """Run `run.work`; send a traceback to the parent if it fails.

    Args:
        words: the file descriptor of the connection to the parent, and the other arguments of `run.work` as JSON.
    """
    line = Connection(int(words[0]))
    folder, engine, only = json.loads(words[1])
    try:
        with _instrumented() if engine == "atheris" else nullcontext():
            from moesaic_lab.fuzz.run import work

            work(line, Path(folder), engine, only)
    except BaseException:
        line.send(traceback.format_exc())


def _instrumented() -> AbstractContextManager[object]:
    import atheris

    return atheris.instrument_imports(include=["moesaic"])


if __name__ == "__main__":
    main(sys.argv[1:])
