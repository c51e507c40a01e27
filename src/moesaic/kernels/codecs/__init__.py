"""The codecs, which encode rows in fewer bytes and decode them. They do not depend on a transport.

To add one, add a file here and a line to `moesaic.codecs.CODECS`.
"""

from __future__ import annotations

from importlib import import_module

from moesaic.codecs import CODECS, codec_spec
from moesaic.errors import InputError
from moesaic.kernels.codecs.codec import AbstractCodec

__all__ = ["AbstractCodec", "codec_named", "missing_codecs"]


def codec_named(name: str) -> AbstractCodec:
    """Return the codec with this name; an option may follow the name after a colon.

    Raises:
        InputError: there is no such codec, or a package that the codec needs is not installed.
    """
    spec = codec_spec(name)
    module_name, class_name = spec.implementation.split(".")
    module = import_module(f"{__name__}.{module_name}")
    codec: AbstractCodec = getattr(module, class_name)(**spec.arguments)
    codec.check_available()
    return codec


def missing_codecs() -> list[str]:
    """Return the codecs that this machine lacks, because a package that they need is not
    installed."""
    missing = []
    for codec in CODECS:
        try:
            codec_named(codec)
        except InputError:
            missing.append(codec)
    return missing
