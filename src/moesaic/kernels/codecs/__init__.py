"""The codecs: rows to fewer bytes and back. They know no transport.

`moesaic.codecs.CODECS` lists them: to add one, a new file here and a line there.
"""

from __future__ import annotations

from importlib import import_module

from moesaic import codecs
from moesaic.kernels.codecs.codec import AbstractCodec, Field, Identity
from moesaic.kernels.codecs.eight import Fp8, Int8
from moesaic.kernels.codecs.sixteen import Bf16, Fp16
from moesaic.kernels.codecs.zfp import Zfp


def _class_of(implementation: str) -> type[AbstractCodec]:
    file, name = implementation.split(".")
    found: type[AbstractCodec] = getattr(import_module(f"{__name__}.{file}"), name)
    return found


CODECS = {name: _class_of(spec.implementation) for name, spec in codecs.CODECS.items()}
"""The classes of the codecs that `moesaic.codecs.CODECS` lists, by the same names."""


def codec_named(name: str) -> AbstractCodec:
    """Return a codec by its name, with the option that stands behind a colon there.

    Raises:
        InputError: there is no such codec, or a package that it needs is not installed.
    """
    codec = _class_of(codecs.codec_spec(name).implementation)(**codecs.codec_spec(name).arguments)
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
