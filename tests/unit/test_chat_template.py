"""Chat templates: which text is the assistant's, where templates are found, and what hostile ones cannot do."""

import json
from pathlib import Path
from typing import Any

import pytest

from ascend_moe_train.data import chat_worker
from ascend_moe_train.data.chat_template import Answers, ChatRenderer, Rendered, TemplateSource, find_template
from ascend_moe_train.errors import DataError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Llama 2's: the system message is inside the first user turn, roles are no words, turns are told apart by markers.
INSTRUCT = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content ~ '\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}{{ bos_token }}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST] {{ system if loop.first else '' }}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
# As Qwen3's: the last answer is written otherwise than the ones before it.
UNSTABLE = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}<think>{% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": " Eins. "},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Zwei ü."},
]


def render(template: str, messages: list[dict[str, Any]] = TALK, answers: Answers = "all") -> Rendered:
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    source = TemplateSource(text=template, path=Path("t.jinja"), variables=variables)
    with ChatRenderer(source, answers) as renderer:
        return renderer.render({"messages": messages, "tools": None}, "f.jsonl: line 7")


def said(rendered: Rendered) -> list[str]:
    return [rendered.text[start:end] for start, end in rendered.spans]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, [" Eins. <|im_end|>\n", "Zwei ü.<|im_end|>\n"]),
        (INSTRUCT, ["  Eins. </s>", " Zwei ü.</s>"]),
        (MARKED, ["Eins.</s>", "Zwei ü.</s>"]),
    ],
)
def test_the_assistants_turns_are_found(template: str, expected: list[str]) -> None:
    rendered = render(template)
    assert said(rendered) == expected
    assert "".join(said(rendered)) not in rendered.text
    assert not set(chat_worker.OPENING + chat_worker.CLOSING) & set(rendered.text)
    assert said(render(template, answers="last")) == expected[1:]


def test_text_is_that_of_the_template() -> None:
    assert render(INSTRUCT).text == "<s>[INST] Be kind.\nOne? [/INST]  Eins. </s>[INST] Two? [/INST] Zwei ü.</s>"
    assert render(MARKED).text.startswith("<system>\nBe kind.<user>\nOne?<assistant>\nEins.</s>")


def test_a_conversation_may_go_on_after_the_last_answer() -> None:
    rendered = render(CHATML, TALK[:4])
    assert said(rendered) == [" Eins. <|im_end|>\n"]
    assert rendered.text.endswith("Two?<|im_end|>\n")


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_the_last_answer_is_enough() -> None:
    with pytest.raises(
        DataError, match=r"f\.jsonl: line 7: chat template t\.jinja: it writes the messages .* message 3"
    ):
        render(UNSTABLE)
    assert said(render(UNSTABLE, answers="last")) == ["<think>Zwei ü."]


def test_tools_and_tool_calls_reach_the_template() -> None:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + MARKED.replace(
        "{{ m.content | trim }}", "{{ m.tool_calls | tojson if m.tool_calls else m.content }}"
    )
    source = TemplateSource(text=template, path=Path("t.jinja"), variables={"eos_token": "</s>"})
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f<ü>"}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "three"},
    ]
    with ChatRenderer(source, "all") as renderer:
        rendered = renderer.render({"messages": messages, "tools": [{"name": "f"}]}, "here")
    assert said(rendered) == ['[{"name": "f<ü>"}]</s>', "three</s>"]
    assert rendered.text.startswith('[{"name": "f"}]')


# A template, and what the line says.
HOSTILE = {
    "syntax error": ("{% for %}", r"t\.jinja: line 1: Expected an expression"),
    "unknown tag": ("{% exec 'x' %}", r"t\.jinja: line 1: Encountered unknown tag 'exec'"),
    "tag that is not closed": ("{% generation %}x", r"t\.jinja: line 1: Unexpected end of template"),
    "class of a value": ("{{ ''.__class__.__mro__ }}", r"access to attribute '__class__' of 'str' object is unsafe"),
    "globals of a helper": ("{{ cycler.__init__.__globals__ }}", r"access to attribute '__init__' .* is unsafe"),
    "class through a filter": ("{{ messages | attr('__class__') }}", r"attribute '__class__' of 'list' .* unsafe"),
    "class through a format": ("{{ '{0.__class__}'.format(messages) }}", r"attribute '__class__' of 'list' .* unsafe"),
    "changing what it is given": ("{{ messages.append(1) }}", r"access to attribute 'append' .* is unsafe"),
    "a file": ("{% include '/etc/passwd' %}", r"no loader for this environment"),
    "a random number": ("{{ messages | random }}", r"t\.jinja: line 1: No filter named 'random'"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"RecursionError: maximum recursion depth"),
    "huge output": ("{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", r"writes more than 16777216 characters"),
    "huge text": ("{{ 'x' * 10 ** 12 }}", r"it takes more than 1024 MiB of memory"),
    "wide format": ("{{ '%999999999999d' % 1 }}", r"it takes more than 1024 MiB of memory"),
    "missing name": ("{{ bos_tokn }}", r"'bos_tokn' is undefined"),
    "its own refusal": ("{{ raise_exception('roles must alternate') }}", r"t\.jinja: roles must alternate$"),
    "no word of the answers": ("hello", r"it writes nothing for the assistant's turns"),
    "half a surrogate pair": (r"{{ '\ud800' }}", r"UnicodeEncodeError: .* surrogates not allowed"),
    "nested blocks": (
        "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
        r"a \{% generation %\} block inside another",
    ),
    "several lines of trouble": ("{{ raise_exception('one\ntwo') }}", r"t\.jinja: one two$"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_templates_with(case: str) -> None:
    template, message = HOSTILE[case]
    with pytest.raises(DataError, match=message) as raised:
        render(template)
    assert "\n" not in str(raised.value)


def test_a_template_that_never_ends_is_ended(tmp_path: Path) -> None:
    # the alarm of the worker, at a time that a test can wait for
    short = tmp_path / "worker.py"
    short.write_text(Path(chat_worker.__file__).read_text().replace("MAX_S = 10", "MAX_S = 1"))
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_worker, "__file__", str(short))
        with pytest.raises(DataError, match=r"f\.jsonl: line 7: chat template t\.jinja: it does not end within"):
            render(loops)


# Files beside tokenizer.json, the template given by name, and the template that is found or what the line says.
FOUND: dict[str, tuple[dict[str, object], str | None, str]] = {
    "given": ({"mine.jinja": "M", "chat_template.jinja": "J"}, "mine.jinja", "M"),
    "file": ({"chat_template.jinja": "J", "tokenizer_config.json": {"chat_template": "C"}}, None, "J"),
    "in the config": ({"tokenizer_config.json": {"chat_template": "C"}}, None, "C"),
    "one of several": (
        {
            "tokenizer_config.json": {
                "chat_template": [{"name": "a", "template": "A"}, {"name": "default", "template": "D"}]
            }
        },
        None,
        "D",
    ),
}
NOT_FOUND: dict[str, tuple[dict[str, object], str | None, str]] = {
    "nothing": ({}, None, r"tokenizer\.json: no chat template beside it"),
    "none of several": (
        {"tokenizer_config.json": {"chat_template": [{"name": "a", "template": "A"}]}},
        None,
        "no chat t",
    ),
    "absent file": ({}, "mine.jinja", r"mine\.jinja: no such file, a chat template is needed"),
    "folder": ({}, ".", r"no such file, a chat template is needed"),
    "too large": ({"mine.jinja": "x" * (1 << 21)}, "mine.jinja", r"2097152 bytes, allowed are at most 1048576"),
    "not UTF-8": ({"mine.jinja": b"a\xff"}, "mine.jinja", r"mine\.jinja: not UTF-8 at byte offset 1"),
    "number": (
        {"tokenizer_config.json": {"chat_template": 3}},
        None,
        r"tokenizer_config\.json: chat_template is no text",
    ),
    "config of other JSON": ({"tokenizer_config.json": [1]}, None, r"a JSON list, an object is needed"),
    "config that is no JSON": ({"tokenizer_config.json": b"{"}, None, r"tokenizer_config\.json: not JSON that can be"),
    "token of another type": ({"tokenizer_config.json": {"bos_token": 3}}, None, r"bos_token is of type int, text is"),
}


def write(folder: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())


@pytest.mark.parametrize("case", FOUND)
def test_a_template_is_found(case: str, tmp_path: Path) -> None:
    files, given, expected = FOUND[case]
    write(tmp_path, files)
    source = find_template(tmp_path / "tokenizer.json", None if given is None else tmp_path / given, "<end>")
    assert source.text == expected


@pytest.mark.parametrize("case", NOT_FOUND)
def test_a_template_is_not_found(case: str, tmp_path: Path) -> None:
    files, given, message = NOT_FOUND[case]
    write(tmp_path, files)
    with pytest.raises(DataError, match=message) as raised:
        find_template(tmp_path / "tokenizer.json", None if given is None else tmp_path / given, "<end>")
    assert "\n" not in str(raised.value)


def test_special_tokens_come_from_the_config_and_count_in_the_checksum(tmp_path: Path) -> None:
    write(
        tmp_path, {"tokenizer_config.json": {"chat_template": "C", "bos_token": {"content": "<b>"}, "pad_token": None}}
    )
    source = find_template(tmp_path / "tokenizer.json", None, "<end>")
    assert source.variables == {"bos_token": "<b>", "eos_token": "<end>"}
    write(tmp_path, {"tokenizer_config.json": {"chat_template": "C", "bos_token": "<b>", "eos_token": "<e>"}})
    other = find_template(tmp_path / "tokenizer.json", None, "<end>")
    assert other.variables["eos_token"] == "<e>"
    assert other.sha256 != source.sha256
