"""Data of fine-tuning: rows with tools, lists of JSON, and which row is bad."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

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


def test_messages_come_before_text(tmp_path):
    text = json.dumps({"text": "w5", "messages": CHAT})
    assert rows(tmp_path / "data.jsonl", text, 3) == [[8, 9, 2]]


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
            '{"text": "w5"}\n{"messages": [{"role": "user", "content": "w5"}]}',
            "line 2: the chat template refuses its messages (no)",
        ),
        ("data.jsonl", '{"text": "w5"}\n{"text": "w6", "text": "w7"}', "the key 'text' twice"),
        ("data.json", '[{"text": "w5"}, {"messages": [{"a": 1, "a": 2}]}]', "the key 'a' twice"),
        ("data.txt", "w5 w6\0", "data.txt: cannot be read as text (it has zero bytes)"),
        ("data.parquet", "PAR1", "data.parquet: datasets cannot load its split train"),
    ],
)
def test_a_bad_row_is_named(tmp_path, name, text, line):
    template = "{{ raise_exception('no') }}"
    assert line in refused(rows, tmp_path / name, text, 2, template)


CALL = {"type": "function", "function": {"name": "w7", "arguments": {}}}
ROLES = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ message['content'] }} "
    "{% elif message['role'] == 'assistant' %}w3 {{ message['content'].split('</think>')[-1] }} "
    "{% elif message['role'] == 'tool' %}w4 {{ message['content'] | trim }} {% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ({"role": "human", "content": "w5"}, "message 2, of role 'human', is not as it stands"),
        ({"role": "system", "content": "w5"}, "message 2, of role 'system', is not as it stands"),
        ({"role": "user"}, "message 2 has no \"role\" and \"content\" ({'role': 'user'})"),
        ({"role": "user", "content": None}, 'message 2 has no "role" and "content"'),
        ({"role": 7, "content": "w5"}, 'message 2 has no "role" and "content"'),
        ({"from": "human", "value": "w5"}, 'message 2 has no "role" and "content"'),
        ("w5", 'message 2 has no "role" and "content" (\'w5\')'),
        ({"role": "user", "content": "w5", "weight": 0}, 'message 2 has "weight" 0, but all'),
        ({"role": "user", "content": "w5", "train": False}, 'message 2 has "train" False'),
        ({"role": "user", "content": [{"type": "text", "text": "w5"}]}, "message 2, of role"),
        ({"role": "assistant", "content": "", "tool_calls": [CALL]}, "message 2, of role"),
        ({"role": "critic", "content": CHAT[0]["content"]}, "message 2, of role 'critic'"),
        ({"role": "function", "content": "w5"}, "message 2, of role 'function'"),
        ({"role": "assistant", "content": "w5", "thinking": "w6"}, "message 2, of role"),
        ({"role": "assistant", "content": "w5", "tool_calls": ["odd"]}, "message 2, of role"),
        ({"role": "assistant", "content": "w5", "reasoning_content": "w5"}, "message 2, of role"),
    ],
)
def test_a_message_that_the_template_would_lose_is_named(tmp_path, message, line):
    text = json.dumps({"messages": [*CHAT, message]})
    said = refused(rows, tmp_path / "data.jsonl", text, 2, ROLES)
    assert f"data.jsonl: line 1: {line}" in said


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "<think>\nw9\n</think>\n\n w5"},
        {"role": "assistant", "content": " w5\n", "tool_calls": None},
        {"role": "assistant", "content": "w5", "reasoning_content": "w9", "thinking": "w9"},
        {"role": "assistant", "content": "w5", "name": "w9", "weight": 1},
    ],
)
def test_earlier_reasoning_and_spaces_may_be_left_out(tmp_path, message):
    text = json.dumps({"messages": [message, {"role": "tool", "content": "w6"}]})
    assert rows(tmp_path / "data.jsonl", text, 5, ROLES) == [[3, 5, 4, 6, 2]]


def test_calls_are_whole_in_what_a_template_writes(tmp_path):
    """Arguments are a table, or its text, as OpenAI has them."""
    template = (
        "{% for message in messages %}{{ message['content'] }}"
        "{% for call in message['tool_calls'] or [] %}{{ call['function']['name'] }}"
        "{{ call['function']['arguments'] | tojson }}{% endfor %}{% endfor %}"
    )
    for arguments in ({"place": "w6"}, '{"place": "w6"}'):
        function = {"name": "w7", "arguments": arguments}
        call = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
        text = json.dumps({"messages": [*CHAT, call]})
        rows(tmp_path / "data.jsonl", text, 1, template)
        without = template.replace("{{ call['function']['arguments'] | tojson }}", "")
        assert "message 2, of role" in refused(rows, tmp_path / "data.jsonl", text, 1, without)


def test_a_text_without_a_token_leaves_whole_numbers(tmp_path):
    tokenizer = words_tokenizer()
    tokenizer.eos_token = None
    (tmp_path / "data.jsonl").write_text('{"text": " "}\n{"text": "w5 w6"}')
    found = sequences(str(tmp_path / "data.jsonl"), tokenizer, 2, 1)
    assert found.dtype == torch.int64
    assert found.tolist() == [[5, 6]]


def test_a_rows_options_reach_the_template(tmp_path):
    template = PLAIN + "{% if enable_thinking is false %} w5{% endif %}"
    row = {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}}
    assert rows(tmp_path / "data.jsonl", json.dumps(row), 4, template) == [[8, 9, 5, 2]]
    row["chat_template_kwargs"] = [1]
    line = refused(rows, tmp_path / "data.jsonl", json.dumps(row), 4, template)
    assert "line 1: the chat template refuses its messages" in line


@pytest.mark.parametrize("field", ["images", "documents"])
@pytest.mark.parametrize("row", [{"messages": CHAT}, {"text": "w8 w9"}])
def test_what_is_beside_a_text_is_not_lost(tmp_path, row, field):
    line = refused(rows, tmp_path / "data.jsonl", json.dumps(row | {field: ["w7"]}), 2)
    assert f'line 1: has "{field}", which no text is made of' in line
    assert rows(tmp_path / "data.jsonl", json.dumps(row | {field: []}), 3) == [[8, 9, 2]]


@pytest.mark.parametrize("name", ["data.JSONL", "data.ndjson", "data.Json"])
def test_the_suffix_says_what_a_file_holds_in_any_case(tmp_path, name):
    assert rows(tmp_path / name, '{"text": "w5"}\n{"text": "w6"}', 4) == [[5, 2, 6, 2]]


def test_a_byte_order_mark_is_no_text(tmp_path):
    assert rows(tmp_path / "data.txt", "\ufeffw5 w6", 3) == [[5, 6, 2]]


def test_a_table_is_no_text(tmp_path):
    pytest.importorskip("datasets", reason="pip install datasets")
    assert rows(tmp_path / "data.csv", "number,text\n1,w5 w6\n2,w7 w8\n", 3) == [
        [5, 6, 2],
        [7, 8, 2],
    ]


def test_a_bad_row_of_a_dataset_is_named(tmp_path):
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    datasets.Dataset.from_dict({"text": ["w5 w6", None, "w7"]}).save_to_disk(tmp_path / "data")
    assert "row 2: has neither" in refused(
        sequences, str(tmp_path / "data"), words_tokenizer(), 2, 1
    )
