"""Reads what lies beside the weights of a model: its configuration, its tokenizer, its generation
settings.

Such a folder may come from anybody, and transformers lets a configuration choose code: repositories
of kernels for attention and experts (`attn_implementation`), classes of the repository itself
(`auto_map`), other models (an adapter's base). Here files are read as data, such entries are left
out at any depth, and transformers gets the objects that are made of the rest. It is never handed
the folder itself.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download

from moesaic.errors import InputError, broken_package
from moesaic.files import MOST_TEXT, read_bytes, read_text, write
from moesaic.weights.card import CARD
from moesaic.weights.quantized import METHODS, QUANTIZATION, refused_quantization

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
RECEIPT = "receipt.json"
"""The file into which a conversion writes its receipt, in the output folder."""
WEIGHTS = ("*.safetensors",)
WORDS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
"""Patterns of files of the hub: weights, and all that surrounds them. Code is never fetched."""
TEMPLATES = "*.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of a model's chat templates besides the first."""
OF_HUB = ("revision", "cache_dir", "token", "local_files_only", "force_download")
"""The options that say what is fetched from the hub, and how."""
CODE = re.compile(
    r"_?(attn|experts)_implementation(_internal)?|auto_map|trust_remote_code|code_revision|"
    r"custom_generate"
    r"|custom_pipelines|_?kernel_config|use_kernels|fusion_config|distributed_config|"
    r"quantization_config"
    r"|transformers_weights|use_pretrained_backbone|_commit_hash|_?name_or_path"
)
"""Entries that may make transformers fetch or run code, or read another model or file."""
CLASS = re.compile(
    r"attribute_map|sub_configs|extra_(config_)?files|base_model_\w+_plan|num_labels|"
    r"__(?!float__)\w+__"
)
"""Entries that would replace what the class of a configuration says, through which an entry could
take another's place."""
RETURNS = re.compile(r"output_(attentions|hidden_states)|(use_)?return_dict|torchscript")
"""Entries that change what a call of the model returns."""
PATHS = re.compile(r"\w+_file")
"""Entries of a tokenizer's configuration that name files to read."""


def source_folder(
    source: str | Path, patterns: Sequence[str] = (*WORDS, *WEIGHTS), **of_hub: Any
) -> Path:
    """Return the folder of a model; one of the hub is fetched, without code.

    Args:
        source: a folder, or a model's name on the hub.
        patterns: the files that are needed.
        of_hub: options of `huggingface_hub.snapshot_download`, those of `OF_HUB`.

    Raises:
        InputError: there is no such folder, and the hub has no such model or cannot be reached.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder
    try:
        fetched = snapshot_download(
            str(source),
            allow_patterns=list(patterns),
            # of subfolders, only chat templates are wanted
            ignore_patterns=[f"*/{each}" for each in patterns if each != TEMPLATES],
            **of_hub,
        )
    except Exception as error:  # of the hub, of the network, of a name that is none
        reason = " ".join(str(error).split())
        raise InputError(
            f"{source}: is neither a folder nor a name on the hub of a model that can be "
            f"fetched ({reason:.100})"
        ) from error
    return Path(fetched)


def read_config(
    folder: Path, config_path: Path | None = None, methods: Sequence[str] = METHODS
) -> Any:
    """Return the transformers configuration of a checkpoint, without choices of code and without
    its quantization.

    Args:
        folder: the checkpoint's folder, whose config.json is read if `config_path` is None.
        config_path: another config.json, or the folder of one.
        methods: quantizations that the caller can read.

    Raises:
        InputError: there is no configuration, transformers does not know it, or its quantization
            cannot be read.
    """
    path = config_path or folder
    if path.is_dir():
        path = path / CONFIG
    if not path.exists():
        raise InputError(
            f"{path}: no configuration there: name the model's transformers config.json with "
            "--config"
        )
    try:
        config = transformers.AutoConfig.for_model(**read_settings(path))
        if not isinstance(getattr(config, "dtype", None), torch.dtype | None):
            raise ValueError(f"its dtype {config.dtype!r} is none of torch's")
    except Exception as error:  # transformers' checks may raise anything
        if broken := broken_package(error):
            raise InputError(broken) from error
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path}: is not a configuration that transformers {transformers.__version__} knows "
            f"({reason:.80}): update transformers, or name the model's config.json with --config"
        ) from error
    if reason := refused_quantization(path, methods):
        raise InputError(f"{path}: {reason}")
    return config


def read_settings(path: Path) -> dict[str, Any]:
    """Return the table of a JSON file of transformers, without choices of code at any depth.

    Raises:
        OSError, ValueError: the file cannot be read, or is no table of JSON.
    """
    found = json.loads(read_text(path), object_hook=_table)
    if not isinstance(found, dict):
        raise ValueError("it is no table")
    return found


def _table(table: dict[str, Any]) -> Any:
    """Return a table without choices of code, or the number of {"__float__": "Infinity"}, as
    transformers writes numbers that JSON does not have."""
    if table.keys() == {"__float__"}:
        return float(table["__float__"])
    return _choiceless(table)


def _choiceless(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table without entries that choose code."""
    return {name: value for name, value in table.items() if not _chooses(name)}


def _chooses(name: str) -> bool:
    """Whether an entry of a configuration chooses code or what a call returns, or would replace a
    method or a rule of the configuration's class."""
    if any(pattern.fullmatch(name) for pattern in (CODE, CLASS, RETURNS)):
        return True
    kinds = (transformers.PreTrainedConfig, transformers.GenerationConfig)
    return any(callable(getattr(kind, name, None)) for kind in kinds)


def read_generation(folder: Path) -> Any:
    """Return the generation settings of a checkpoint; None if it has none.

    Raises:
        InputError: they are damaged.
    """
    path = folder / GENERATION
    if not path.exists():
        return None
    try:
        return transformers.GenerationConfig.from_dict(read_settings(path))
    except Exception as error:  # transformers' checks may raise anything
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path}: are no settings that transformers knows ({reason:.80}): restore the file"
        ) from error


def read_tokenizer(folder: Path, name: str) -> Any:
    """Return a model's tokenizer, made by a class of transformers from the files of the folder
    alone.

    Args:
        name: the model, as the user named it.

    Raises:
        InputError: it has none that transformers can load without code of the repository.
    """
    try:
        with tempfile.TemporaryDirectory() as place:
            write_companions(companions(folder), Path(place))
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                place,
                config=transformers.AutoConfig.for_model(**read_settings(folder / CONFIG)),
                trust_remote_code=False,
                local_files_only=True,
            )
            # without files, some classes know no word
            if not tokenizer("text", add_special_tokens=False)["input_ids"]:
                raise ValueError("there are no files of one")
    except InputError:
        raise
    except Exception as error:  # of a file, of a tokenizer's own code
        if broken := broken_package(error):
            raise InputError(broken) from error
        reason = " ".join(str(error).split())
        raise InputError(
            f"{name}: has no tokenizer that transformers can load ({reason:.100}): add its files"
        ) from error
    tokenizer.name_or_path = name
    tokenizer.init_kwargs.pop("name_or_path", None)
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer, with all its chat templates in files of the folder itself."""
    # several templates would get a folder of their own, so they go into tokenizer_config.json
    has_one_template = not isinstance(tokenizer.chat_template, dict)
    tokenizer.save_pretrained(folder, save_jinja_files=has_one_template)


def write_companions(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files of `companions` into a folder of ours."""
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)  # templates may be in a folder of their own
        write(folder / name, data)


def companions(folder: Path) -> dict[str, bytes]:
    """Return the files that accompany the weights, by name below the folder: tokenizer, chat
    templates, generation settings, model card.

    Settings that choose code are left out of them. Links count only within the folder, or within
    the cache of a hub that holds it: others may lead to files of the reader that the sender of the
    folder wants to see in the output.

    Raises:
        InputError: a file cannot be read, or is a link to another place.
    """
    home = folder.resolve()
    allowed = [home]
    # The hub's cache keeps a model's files in models--NAME/blobs, and in
    # models--NAME/snapshots/COMMIT links to them.
    cache = home.parent.parent
    if cache.name.startswith("models--"):
        allowed.append(cache / "blobs")

    found = {}
    more_templates = (folder / MORE_TEMPLATES).glob(TEMPLATES)
    for path in (*sorted(folder.iterdir()), *sorted(more_templates)):
        if not _accompanies(path):
            continue
        if not any(path.resolve().is_relative_to(place) for place in allowed):
            raise InputError(
                f"{str(path)!r}: is a link to a file outside the checkpoint: take it away, or "
                "put that file in its place"
            )
        try:
            data = read_bytes(path, at_most=MOST_TEXT)
            found[path.relative_to(folder).as_posix()] = _without_code(path.name, data)
        except OSError as error:
            raise InputError(
                f"{str(path)!r}: cannot be read ({error.strerror}): take it away"
            ) from error
    return found


def _accompanies(path: Path) -> bool:
    """Whether a file of a checkpoint goes into a converted one as it is; what says how the source
    was stored does not."""
    if path.name in (CONFIG, RECEIPT, QUANTIZATION) or "quant" in path.name:
        return False
    if path.name.endswith(".index.json"):
        return False
    suffixes = {pattern.removeprefix("*") for pattern in WORDS}
    return path.suffix in suffixes or path.name == CARD


def _without_code(name: str, data: bytes) -> bytes:
    """Return a file's bytes; settings are written anew if they choose code, or name files."""
    if not name.endswith("config.json"):
        return data
    try:
        before = json.loads(data)
        after = json.loads(data, object_hook=_choiceless)
    except (ValueError, RecursionError):
        return data  # whoever reads it says that it is damaged
    if name == TOKENIZER_CONFIG and isinstance(after, dict):
        after = {key: value for key, value in after.items() if not PATHS.fullmatch(key)}
    if before == after:
        return data
    return (json.dumps(after, indent=2) + "\n").encode()
