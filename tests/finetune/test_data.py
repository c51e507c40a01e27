"""Data of fine-tuning: rows with tools, lists of JSON, and which row is bad."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason='pip install ".[transformers]"')

from finetuned import words_tokenizer

from helpers import refused
from moesaic.finetune.data import sequences

TOOL = {
    "type": "function",
    "function": {"name": "w7", "parameters": {"type": "object", "properties": {}}},
}
WITH_TOOLS = (
    "{% for tool in tools or [] %}w1 {{ tool['function']['name'] }} {% endfor %}"
    "{% for message in messages %}{{ message['content'] }} {% endfor %}"
)
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
CHAT = [{"role": "user", "content": "w8 w9"}]


def rows(path: Path, text: str, length: int, template: str | None = WITH_TOOLS) -> list[list[int]]:
    """Return the sequences of a file with a text."""
    path.write_text(text)
    tokenizer = words_tokenizer()
    tokenizer.chat_template = template
    found: list[list[int]] = sequences(str(path), tokenizer, length, 1).tolist()
    return found


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_a_rows_tools_reach_the_template(tmp_path, tools):
    text = json.dumps({"messages": CHAT, "tools": tools})
    assert rows(tmp_path / "data.jsonl", text, 5) == [[1, 7, 8, 9, 2]]


@pytest.mark.parametrize("tools", [None, [], ""])
def test_a_row_may_have_no_tools(tmp_path, tools):
    text = json.dumps({"messages": CHAT, "tools": tools})
    assert rows(tmp_path / "data.jsonl", text, 3, PLAIN) == [[8, 9, 2]]


@pytest.mark.parametrize(
    ("tools", "template", "line"),
    [
        ([TOOL], PLAIN, 'line 2: has "tools", which the model\'s chat template'),
        ("w7", WITH_TOOLS, "line 2: its \"tools\" are no list of JSON schemas ('w7')"),
        ({"name": "w7"}, WITH_TOOLS, 'line 2: its "tools" are no list'),
        ([7], WITH_TOOLS, 'line 2: its "tools" are no list'),
    ],
)
def test_tools_that_would_be_lost_are_refused_by_row(tmp_path, tools, template, line):
    text = f"{json.dumps({'messages': CHAT})}\n{json.dumps({'messages': CHAT, 'tools': tools})}"
    assert line in refused(rows, tmp_path / "data.jsonl", text, 3, template)


@pytest.mark.parametrize("start", ["", "\ufeff", " \n"])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_of_json_is_read_as_train_does(tmp_path, start, indent):
    entries = [{"text": "w5 w6"}, {"messages": CHAT}]
    assert rows(tmp_path / "data.json", start + json.dumps(entries, indent=indent), 3) == [
        [5, 6, 2],
        [8, 9, 2],
    ]


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_json_lines_may_begin_with_a_byte_order_mark(tmp_path, name):
    assert rows(tmp_path / name, '\ufeff{"text": "w5"}\n\n{"text": "w6"}', 4) == [[5, 2, 6, 2]]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        (
            "data.jsonl",
            '{"text": "w5"}\n\n{"text": null}',
            'line 3: has neither "text" nor "messages"',
        ),
        (
            "data.jsonl",
            '{"text": "w5"}\n{"text": }',
            "data.jsonl: line 2: cannot be read as JSON lines",
        ),
        ("data.jsonl", '{"text": "w5"}\n\n[1]', "line 3: has neither"),
        (
            "data.json",
            '[{"text": "w5"}, {"prompt": "w5"}]',
            'entry 2: has neither "text" nor "messages"',
        ),
        ("data.json", '[{"text": "w5"}, ', "cannot be read as a list of JSON or JSON lines"),
        (
            "data.jsonl",
            '{"text": "w5"}\n{"messages": [{"role": 7}]}',
            "line 2: the chat template refuses its messages",
        ),
    ],
)
def test_a_bad_row_is_named(tmp_path, name, text, line):
    template = "{{ messages[0]['content']['nothing'] }}"
    assert line in refused(rows, tmp_path / name, text, 2, template)


def test_a_bad_row_of_a_dataset_is_named(tmp_path):
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    datasets.Dataset.from_dict({"text": ["w5 w6", None, "w7"]}).save_to_disk(tmp_path / "data")
    assert "row 2: has neither" in refused(
        sequences, str(tmp_path / "data"), words_tokenizer(), 2, 1
    )
