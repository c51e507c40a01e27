"""A worker process, `python -m moesaic_lab.fuzz.worker`.

Atheris compiles the modules of Moesaic as they are imported, to see which code an input reaches; so nothing here imports one.
"""

from __future__ import annotations

import json
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path


def main(words: list[str]) -> None:
    """Work.

    Args:
        words: the descriptor of the line to the parent, and the other arguments of `run.work` in JSON.
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
