"""Stop strings against the definition: the first end of any of them, the longest one there."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.engine.stop_strings import StopStrings

TEXT = st.text("ab🙂", max_size=30)
STOPS = st.lists(st.text("ab🙂", min_size=1, max_size=5), max_size=4)


def defined(text: str, stops: list[str]) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@settings(deadline=None, derandomize=True)
@given(st.lists(TEXT, max_size=8), STOPS)
def test_any_cutting_gives_what_the_definition_says(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    shown, found = "", False
    for piece in pieces:
        text, found = matcher.push(piece)
        shown += text
    shown += matcher.flush()
    assert (shown, found) == defined("".join(pieces), stops)


@settings(deadline=None, derandomize=True)
@given(st.lists(TEXT, max_size=8), STOPS)
def test_all_that_is_certain_is_shown_at_once(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    pushed = shown = ""
    for piece in pieces:
        text, found = matcher.push(piece)
        pushed, shown = pushed + piece, shown + text
        if found:
            return
        begun = [
            length
            for stop in stops
            for length in range(1, len(stop))
            if pushed.endswith(stop[:length])
        ]
        assert len(pushed) - len(shown) == max(begun, default=0)


def test_text_before_a_match_is_passed_on_and_text_after_it_dropped() -> None:
    matcher = StopStrings(["\n\n"])
    assert matcher.push("one\n") == ("one", False)
    assert matcher.push("two\n") == ("\ntwo", False)
    assert matcher.push("\nthree") == ("", True)
    assert matcher.push("four") == ("", True)
    assert matcher.flush() == ""


def test_without_stop_strings_text_passes_unchanged() -> None:
    matcher = StopStrings([])
    assert matcher.push("text") == ("text", False)
    assert matcher.flush() == ""


def test_a_long_stop_string_costs_linear_time() -> None:
    matcher = StopStrings(["a" * 20_000 + "b"])
    shown = "".join(matcher.push("a" * 100)[0] for _ in range(1_000))
    assert len(shown) == 80_000
    assert matcher.push("b") == ("", True)
