"""Unit files as systemd reads them: recorded oddities one by one, and quoting proven by a round trip."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.box import unitfile
from orchestrator.box.unitfile import (
    commands,
    environment,
    environment_files,
    exec_argv,
    expand,
    parse,
    parse_environment_file,
    quote_env,
    quote_env_file,
    quote_exec,
    quote_words,
    specify,
    split_variable,
    unit_specifiers,
    words,
)
from orchestrator.errors import UsageError

ROOT = unit_specifiers(
    "vllm@a-b.service", user="root", uid=0, home="/root", fragment="/etc/systemd/system/vllm@.service"
)

SEED = """\
[Unit]
Description=vLLM OpenAI-compatible server (TP=2, MTP spec=5)
After=network.target

[Service]
Type=simple
User=alex
ExecStart=/home/alex/vllm-venv/bin/python -m vllm.entrypoints.openai.api_server \\
  --model /home/alex/models/qwen \\
  # a comment inside a continuation is skipped
  --spec-tokens 3 \\
  --default-chat-template-kwargs '{"enable_thinking": false}' \\
  --host 0.0.0.0 --port 8080
Restart=on-failure
SyslogIdentifier=vllm-qwen

[Install]
WantedBy=multi-user.target
"""


def unit(service: str, *drop_ins: str):
    return parse(f"[Service]\n{service}\n", *drop_ins)


def test_the_seeds_unit_becomes_its_argument_vector():
    assert exec_argv(parse(SEED), ROOT) == (
        *("/home/alex/vllm-venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", "/home/alex/models/qwen", "--spec-tokens", "3"),
        *("--default-chat-template-kwargs", '{"enable_thinking": false}', "--host", "0.0.0.0", "--port", "8080"),
    )


def test_a_drop_in_resets_execstart_and_adds_to_the_environment():
    dropped = unit(
        "ExecStart=/a one\nEnvironment=A=1 B=2",
        "# of the user\n[Service]\nExecStart=\nExecStart=/b two\nEnvironment=B=3",
    )
    assert exec_argv(dropped, ROOT) == ("/b", "two")
    assert environment(dropped, ROOT) == {"A": "1", "B": "3"}


def test_an_empty_environment_forgets_what_came_before():
    assert environment(unit("Environment=A=1\nEnvironment=\nEnvironment=B=2"), ROOT) == {"B": "2"}


def test_the_program_is_first_also_where_it_is_given_another_name():
    assert exec_argv(unit("ExecStart=@/v/python vllm -m x"), ROOT) == ("/v/python", "-m", "x")


def test_two_commands_are_no_server():
    with pytest.raises(UsageError, match="stands for 2 commands"):
        exec_argv(unit("ExecStart=/a\nExecStart=/b"), ROOT)
    with pytest.raises(UsageError, match="stands for 0 commands"):
        exec_argv(unit("ExecStart=/a\nExecStart="), ROOT)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a b\tc", ("a", "b", "c")),
        ("'a b' \"c d\"", ("a b", "c d")),
        ("a'b c'd", ("ab cd",)),
        ("\"\" ''", ("", "")),
        (r'"{\"a\": \"b c\"}"', ('{"a": "b c"}',)),
        (r"'it'\''s'", ("it's",)),
        (r"\x41\101\u00e4\U0001f600", ("AAä😀",)),
        (r"a\sb\tc\nd", ("a b\tc\nd",)),
        (r"'\"' \\", ('"', "\\")),
        (r"\d+\w", (r"\d+\w",)),
        (r"\xc3\xa4", ("ä",)),
        (r"\xff", ("\udcff",)),
    ],
)
def test_words_are_split_as_systemd_splits_them(text, found):
    assert words(text) == found


@pytest.mark.parametrize("text", ['"a', "'", "a\\"])
def test_a_quote_or_escape_without_an_end_is_refused(text):
    with pytest.raises(UsageError):
        words(text)


def test_an_unknown_escape_ends_the_rest_of_an_environment_line_as_in_systemd():
    assert environment(unit(r'Environment=A=1 "B=\d" C=3'), ROOT) == {"A": "1"}


@pytest.mark.parametrize(
    ("value", "path", "argv", "flags"),
    [
        ("-/bin/a b", "/bin/a", ("/bin/a", "b"), {"-"}),
        ("@/bin/a name b", "/bin/a", ("name", "b"), {"@"}),
        ("+:-/bin/a $X", "/bin/a", ("/bin/a", "$X"), {"+", ":", "-"}),
        ("!!/bin/a", "/bin/a", ("/bin/a",), {"!"}),
        (r"/bin/a \; b", "/bin/a", ("/bin/a", ";", "b"), set()),
        (
            "/bin/a %% %i %I %n %h %u",
            "/bin/a",
            ("/bin/a", "%", "a-b", "a/b", "vllm@a-b.service", "/root", "root"),
            set(),
        ),
        ("/bin/a 100% %Z", "/bin/a", ("/bin/a", "100%", "%Z"), set()),
    ],
)
def test_prefixes_and_specifiers(value, path, argv, flags):
    (found,) = commands(value, ROOT)
    assert (found.path, found.argv, found.flags) == (path, argv, flags)


def test_a_semicolon_of_its_own_separates_commands():
    assert [found.argv for found in commands("/bin/a b ; /bin/c;d", ROOT)] == [("/bin/a", "b"), ("/bin/c;d",)]


def test_a_specifier_that_is_known_to_systemd_but_not_to_us_is_named():
    with pytest.raises(UsageError, match="uses %b, whose value is not known"):
        specify("x%b", ROOT)
    assert specify("x%b", ROOT | {"b": "42"}) == "x42"


def test_a_users_manager_has_its_own_specifiers():
    found = unit_specifiers("v.service", user="alex", uid=1000, home="/home/alex", runtime_dir="/run/user/1000")
    assert (found["h"], found["u"], found["U"], found["t"], found["C"]) == (
        *("/home/alex", "alex", "1000", "/run/user/1000", "/home/alex/.cache"),
    )
    assert found["N"] == found["p"] == "v"


def test_variables_are_expanded_at_execution():
    env = {"ARGS": "a 'b c'", "ONE": "x y"}
    assert expand(("p", "$ARGS", "${ONE}", "-${ONE}-", "$NONE", "${NONE}", "a$ONE", "$$ONE", "a$$b", "$"), env) == (
        *("p", "a", "b c", "x y", "-x y-", "", "a$ONE", "$ONE", "a$b"),
    )


def test_environment_files_are_noted_and_override_environment():
    found = unit("Environment=A=1\nEnvironmentFile=-/etc/default/%p\nEnvironmentFile=/etc/x\nUnsetEnvironment=C")
    assert environment_files(found, ROOT) == (("/etc/default/vllm", True), ("/etc/x", False))
    text = '# comment \\\nA=0\n;\nA=2\nB=\'3 4\' x\'y\nC=5\nD="say \\"hi\\""\n  E = 6\nF=a\\\nb\n\nG\n1=2\n'
    got = environment(found, ROOT, {"/etc/x": text})
    assert (got["A"], got["B"], got["D"], got["E"], got["F"]) == ("2", "3 4x'y", 'say "hi"', "6", "ab")
    assert "C" not in got


@pytest.mark.parametrize(
    ("text", "what"),
    [("[Service\nA=1", "line 1: section header"), ("[Service]\n\nnonsense", "line 3: neither a section")],
)
def test_a_broken_line_is_named(text, what):
    with pytest.raises(UsageError, match=what):
        parse(text)


def test_comments_blank_lines_a_byte_order_mark_and_windows_line_ends():
    found = parse("\ufeff; a\r\n[Service]\r\n\r\n  ExecStart = /a b \\\r\n# no\r\n   c\r\n")
    assert exec_argv(found, ROOT) == ("/a", "b", "c")


def test_an_even_number_of_backslashes_continues_nothing():
    assert exec_argv(unit("ExecStart=/a b\\\\\nType=simple"), ROOT) == ("/a", "b\\")


# --- writing -------------------------------------------------------------------------------------------------------

TRICKY = st.sampled_from(
    ["%", "$", "${HOME}", "$HOME", "%h", '"', "'", "\\", "\n", "\r", "\t", " ", ";", "#", "{", "\x01"]
)
TEXT = st.lists(st.one_of(TRICKY, st.characters(exclude_characters="\0", exclude_categories=("Cs",)))).map("".join)
ENV_TEXT = TEXT.filter(
    lambda text: (
        not any((c < " " and c not in "\n\t") or c == "\x7f" or ord(c) & 0xFFFE == 0xFFFE for c in text)
        and not any(0xFDD0 <= ord(c) <= 0xFDEF for c in text)
    )
)
PROGRAM = st.text("abcdefgXYZ0189_.%$ äß/", min_size=1).map(lambda text: "/opt/" + text + "x")


@given(PROGRAM, st.lists(TEXT, max_size=6))
def test_what_we_write_as_execstart_reads_back_unchanged(program, arguments):
    argv = (program, *arguments)
    text = f"[Service]\nExecStart=/production\nExecStart=\nExecStart={quote_exec(argv)}\nType=simple\n"
    found = parse(text)
    assert exec_argv(found, ROOT, {"HOME": "/wrong", "ARGS": "wrong"}) == argv
    assert found.last("Service", "Type") == "simple"


@given(st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,5}", fullmatch=True), ENV_TEXT, max_size=5))
def test_what_we_write_as_environment_reads_back_unchanged(env):
    lines = "".join(f"Environment={quote_env(name, value)}\n" for name, value in env.items())
    assert environment(unit(lines), ROOT) == env


@given(st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,5}", fullmatch=True), ENV_TEXT, max_size=5))
def test_what_we_write_into_an_environment_file_reads_back_unchanged(env):
    assert parse_environment_file("\n".join(quote_env_file(name, value) for name, value in env.items())) == env


@given(st.lists(TEXT, max_size=6))
def test_arguments_in_a_variable_are_split_into_what_they_were(arguments):
    assert split_variable(quote_words(arguments)) == tuple(arguments)
    made = unit("ExecStart=/a $ARGS")
    assert exec_argv(made, ROOT, {"ARGS": quote_words(arguments)}) == ("/a", *arguments)


def test_in_a_variable_a_backslash_is_no_c_escape():
    assert split_variable(r"a\nb 'c\' d' " + r'"e\\\""') == ("anb", "c' d", 'e\\"')


def test_a_plain_word_stays_plain_and_json_stays_readable():
    assert quote_exec(("/bin/a", "--port", "80", "{}", "")) == '/bin/a --port 80 {} ""'
    assert quote_exec(("/bin/a", '{"a": "50%"}', "$x")) == r'/bin/a "{\"a\": \"50%%\"}" $$x'


def test_a_byte_that_is_no_utf8_survives():
    argv = ("/bin/a", "\udcff\ufffe")
    assert quote_exec(argv) == r'/bin/a "\xff\xef\xbf\xbe"'
    assert exec_argv(unit(f"ExecStart={quote_exec(argv)}"), ROOT) == argv


@pytest.mark.parametrize("argv", [(), ("",), ("-x",), ("@x", "y"), ("/a/",), ("/a b'c",), ("/a\n",), ("/a", "b\0")])
def test_what_systemd_would_refuse_is_refused_here(argv):
    with pytest.raises(UsageError):
        quote_exec(argv)


@pytest.mark.parametrize(
    ("name", "value"), [("1A", "x"), ("A-B", "x"), ("", "x"), ("A", "x\r"), ("A", "\x1b[0m"), ("A", "\udcff")]
)
def test_an_environment_that_systemd_would_ignore_is_refused_here(name, value):
    with pytest.raises(UsageError):
        quote_env(name, value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[Unit]\nDescription=x\n[Service]\nType=simple\nExecStart=/bin/v \\\n  --model 'm\n",
            "v.service:5: a quote ' does not",
        ),
        ("[Unit]\n[Service]\nType=simple\n", "v.service:2: ExecStart= stands for 0 commands"),
        ("[Service]\nExecStart\n", "v.service:2: neither a section nor"),
        ("", "v.service:1: ExecStart= stands for 0 commands"),
    ],
)
def test_what_is_wrong_with_a_unit_file_names_the_file_and_the_line(text, told):
    with pytest.raises(UsageError) as wrong, unitfile.problems_of("v.service", text):
        unitfile.exec_argv(unitfile.parse(text), unitfile.unit_specifiers("v.service", user="", uid=0, home=""))
    assert str(wrong.value).startswith(told)
