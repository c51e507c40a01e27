"""The codecs, one a file: rows to fewer bytes and back. They know no wire. To add one: a new file and a line in `CODECS`."""

from __future__ import annotations

from moesaic.errors import InputError
from moesaic.kernels.codecs.codec import AbstractCodec, Field
from moesaic.kernels.codecs.fp8 import Fp8
from moesaic.kernels.codecs.identity import Identity
from moesaic.kernels.codecs.int8 import Int8
from moesaic.kernels.codecs.sixteen import Bf16, Fp16
from moesaic.kernels.codecs.zfp import Zfp

CODECS: dict[str, type[AbstractCodec]] = {
    "none": Identity,
    "bf16": Bf16,
    "fp16": Fp16,
    "int8": Int8,
    "fp8": Fp8,
    "zfp": Zfp,
}


def codec_named(name: str) -> AbstractCodec:
    """Return the codec of that name with its default options.

    Raises:
        InputError: there is no such codec, or a package that it needs is not installed.
    """
    if name not in CODECS:
        raise InputError(f"codec {name!r} is unknown: write one of {', '.join(CODECS)}")
    codec = CODECS[name]()
    codec.check_available()
    return codec


__all__ = [
    "CODECS",
    "AbstractCodec",
    "Bf16",
    "Field",
    "Fp8",
    "Fp16",
    "Identity",
    "Int8",
    "Zfp",
    "codec_named",
]
