"""The codecs: rows to fewer bytes and back. They know no transport.

`moesaic.codecs.CODECS` lists them: to add one, a new file here and a line there.
"""

from __future__ import annotations

from importlib import import_module

from moesaic.codecs import codec_spec
from moesaic.kernels.codecs.codec import AbstractCodec

__all__ = ["AbstractCodec", "codec_named"]


def codec_named(name: str) -> AbstractCodec:
    """Return a codec by its name, with the option that stands behind a colon there.

    Raises:
        InputError: there is no such codec, or a package that it needs is not installed.
    """
    spec = codec_spec(name)
    file, leaf = spec.implementation.split(".")
    codec: AbstractCodec = getattr(import_module(f"{__name__}.{file}"), leaf)(**spec.arguments)
    codec.check_available()
    return codec
