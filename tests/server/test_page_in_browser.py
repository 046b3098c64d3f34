"""The page in a real Chromium: what it shows, keeps, sends and refuses."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import pytest

from edgespec.server.security import Access
from tests.server.test_http import events
from tests.support.browser import browsing, missing, opened, scripted
from tests.support.http_server import Running, running
from tests.support.tiny_models import TinyModels

pytestmark = [pytest.mark.browser, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

KINDS = {"model": "drafter", "lookup": "copies", None: ""}
THEMES = ("light", "dark")
WIDTHS = (1200, 400)
# A chunk appended to a long answer, with its layout: a quarter of a frame at 60 frames a second.
MOST_MS = 4.0
# A person does not notice a shorter time.
STOP_MS = 100.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as found:
        yield found


def chunk(delta: dict[str, Any], own: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    finish = more.pop("finish_reason", None)
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"choices": [choice], **({} if own is None else {"edgespec": own}), **more}


def end(own: dict[str, Any] | None = None, **timings: Any) -> dict[str, Any]:
    none = {
        "predicted_n": 20,
        "predicted_per_second": 50.0,
        "plain_per_second": 40.0,
        "draft_n": 0,
        "draft_n_accepted": 0,
    }
    return chunk({}, own or {}, finish_reason="stop", timings={**none, **timings})


def set_up(page: Any, **settings: Any) -> None:
    """Type settings of the page."""
    page.click("summary >> text=Settings")
    for name, value in settings.items():
        page.fill(f"#{name}", str(value))
        page.press(f"#{name}", "Tab")
    page.click("summary >> text=Settings")


def test_words_are_shaded_by_who_guessed_them(browser: Any, server: Running) -> None:
    chunks = events(server.chat("hello", max_tokens=64, temperature=0, stream=True, edgespec={"tokens": True}))
    expected = list[tuple[str, str]]()
    for each in chunks:
        at, content = 0, each["choices"][0]["delta"].get("content", "")
        for length, source in each.get("edgespec", {}).get("tokens", []):
            expected += [(character, KINDS[source]) for character in content[at : at + length]]
            at += length
    with opened(browser, server) as tab:
        set_up(tab.page, temperature=0, max_tokens=64)
        tab.ask("hello")
        tab.wait()
        # The blanks between words are the same in both, and not shaded where a guess begins with one.
        shown = [each for each in tab.shades if not each[0].isspace()]
        assert shown == [each for each in expected if not each[0].isspace()]
        assert {kind for _, kind in shown} > {""}
        assert tab.asked[0]["edgespec"] == {"tokens": True}
        rounds = [each["edgespec"]["round"] for each in chunks if "round" in each.get("edgespec", {})]
        assert tab.page.locator(".rounds b").count() == len(rounds)
        timings = chunks[-1]["timings"]
        assert f"{timings['draft_n_accepted']} of {timings['draft_n']} guesses right" in tab.foot
        tab.page.uncheck("#shade")
        assert tab.page.evaluate("() => getComputedStyle(document.querySelector('.answer i')).backgroundColor") == (
            "rgba(0, 0, 0, 0)"
        )


def test_each_source_of_a_guess_has_a_shade_that_the_legend_names(browser: Any, server: Running) -> None:
    sources = ("model", "another-model", "lookup", "history", "datastore", "forced", None)
    shades = ["drafter", "drafter", "copies", "learned", "learned", "forced", ""]
    with opened(browser, server) as tab:
        scripted(tab.page, chunk({"content": "abcdefg"}, {"tokens": [[1, source] for source in sources]}), end())
        tab.ask("hello")
        tab.wait()
        assert tab.shades == list(zip("abcdefg", shades, strict=True))
        colour = "each => getComputedStyle(each).backgroundColor"
        for kind in set(shades) - {""}:
            shown = tab.page.locator(f".answer i.{kind}").first.evaluate(colour)
            assert shown == tab.page.locator(f"#legend li.{kind}").evaluate(colour) != "rgba(0, 0, 0, 0)"
        legend = tab.page.locator("#legend li").all_inner_texts()
        assert legend == ["drafter", "copies", "learned", "forced", "not guessed"]


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_stop_ends_the_answer_within_a_moment_and_keeps_its_text(browser: Any, server: Running, how: str) -> None:
    with opened(browser, server) as tab:
        tab.ask("hello")
        tab.page.wait_for_function(
            "() => document.querySelectorAll('.answer .line').length && document.querySelector('.rounds')"
        )
        took = tab.page.evaluate(
            """how => {
              const began = performance.now();
              const escape = new KeyboardEvent("keydown", { key: "Escape", bubbles: true });
              if (how === "Escape") document.querySelector("#text").dispatchEvent(escape);
              else document.querySelector("#send").click();
              if (document.querySelector("#send").textContent !== "Send") throw new Error("it runs on");
              document.body.offsetHeight;
              return performance.now() - began;
            }""",
            how,
        )
        assert took < STOP_MS
        server.wait_until(lambda: server.service.queue.running == 0)
        tab.page.wait_for_function("() => document.querySelector('.foot')?.textContent.includes('stopped')")
        text = tab.answer
        assert text
        tab.page.wait_for_timeout(300)
        assert tab.answer == text, "nothing comes behind the stop"
        tab.page.reload()
        assert tab.answer == text


@pytest.mark.parametrize("click", ["#new", "nav .open"])
def test_an_answer_that_is_left_for_another_conversation_keeps_its_text(
    browser: Any, server: Running, click: str
) -> None:
    with opened(browser, server) as tab:
        tab.ask("hello")
        tab.page.wait_for_function("() => document.querySelectorAll('.answer .line').length")
        text = tab.answer
        tab.page.click(click)
        server.wait_until(lambda: server.service.queue.running == 0)
        tab.page.click("nav .open")
        assert tab.answer.startswith(text)
        assert tab.page.locator(".turn").count() == 2
        tab.page.click("nav .drop")
        assert tab.page.locator("nav li").count() == 0


def test_a_conversation_that_is_deleted_during_its_answer_stays_deleted(browser: Any, server: Running) -> None:
    with opened(browser, server) as tab:
        tab.ask("hello")
        tab.page.wait_for_function("() => document.querySelectorAll('.answer .line').length")
        tab.page.click("nav .drop")
        server.wait_until(lambda: server.service.queue.running == 0)
        tab.page.reload()
        assert tab.page.locator("nav li").count() == 0


def test_what_another_tab_asked_is_shown(browser: Any, server: Running) -> None:
    with opened(browser, server) as tab:
        scripted(tab.page, chunk({"content": "x"}), end())
        tab.ask("first")
        tab.wait()
        other = tab.page.context.new_page()
        scripted(other, chunk({"content": "y"}), end())
        other.goto(tab.url)
        other.fill("#text", "second")
        other.press("#text", "Enter")
        tab.page.wait_for_function("() => document.querySelectorAll('.turn').length === 4")
        tab.ask("third")
        tab.wait()
        assert [each["content"] for each in tab.asked[-1]["messages"]] == ["first", "x", "second", "y", "third"]


def test_markup_in_an_answer_stays_text(browser: Any, server: Running, says: list[str]) -> None:
    markup = '<img src=x onerror="window.hit=1"><script>window.hit=1</script><a href="javascript:window.hit=1">x</a>'
    says += [markup, "\n```html\n", markup, "\n```\n", "&lt;"]
    with opened(browser, server) as tab:
        tab.ask("hello")
        tab.wait()
        assert tab.answer.count(markup) == 2
        assert tab.answer.endswith("&lt;")
        assert tab.page.locator("img, main a, main script, iframe").count() == 0
        assert tab.page.evaluate("() => window.hit ?? null") is None


def test_a_reload_keeps_turns_and_shades(browser: Any, server: Running) -> None:
    with opened(browser, server) as tab:
        set_up(tab.page, max_tokens=24)
        tab.ask("first question")
        tab.wait()
        tab.ask("second question")
        tab.wait()
        shades, foot, bars = tab.shades, tab.foot, tab.page.locator(".rounds b").count()
        tab.page.reload()
        assert tab.page.locator(".you .body").all_inner_texts() == ["first question", "second question"]
        assert (tab.shades, tab.foot, tab.page.locator(".rounds b").count()) == (shades, foot, bars)
        assert tab.page.input_value("#max_tokens") == "24"
        assert [each["role"] for each in tab.asked[-1]["messages"]] == ["user", "assistant", "user"]
        tab.page.click("#new")
        assert tab.page.locator(".turn").count() == 0
        tab.page.click("nav .open")
        assert tab.page.locator(".turn").count() == 4
        tab.page.click("nav .drop")
        assert tab.page.locator("nav li").count() == 0


def test_code_between_fences_is_in_a_box(browser: Any, server: Running) -> None:
    said = "See:\n\n```python\ndef f():\n    return `1`\n\n\nx = 2\n```\nand ~~~ text\n````\n```\n````\n"
    said += "end\n~~~\nlast\n~~~"
    with opened(browser, server, permissions=["clipboard-read", "clipboard-write"]) as tab:
        scripted(tab.page, *(chunk({"content": each}) for each in said), end())
        tab.ask("code")
        tab.wait()
        boxes = tab.page.evaluate("() => [...document.querySelectorAll('pre')].map(pre => lines(pre).join('\\n'))")
        assert boxes == ["def f():\n    return `1`\n\n\nx = 2", "```", "last"]
        assert tab.page.locator("figcaption span").all_inner_texts() == ["python", "text", "text"]
        assert tab.page.locator(".answer > .body > .part").last.evaluate("each => each.textContent") == "end"
        assert tab.page.locator(".fence").count() == 0, "also behind the last line, which has no end"
        tab.page.click("figcaption button >> nth=0")
        tab.page.wait_for_selector("text=Copied")
        assert tab.page.evaluate("() => navigator.clipboard.readText()") == boxes[0] + "\n"


def test_text_from_right_to_left_has_its_direction_line_by_line_and_code_keeps_its_own(
    browser: Any, server: Running
) -> None:
    hebrew, english = "\u05e9\u05dc\u05d5\u05dd!", "Hello!"
    title = "\u05e9" * 79 + "\U0001f600" * 2
    with opened(browser, server) as tab:
        said = f"{hebrew}\n{english}\n- {hebrew}\n```\n{hebrew}\n```\n"
        scripted(tab.page, *(chunk({"content": each}) for each in said), end())
        tab.page.fill("#text", hebrew)
        assert tab.page.locator("#text").evaluate("each => getComputedStyle(each).direction") == "rtl"
        tab.ask(title)
        tab.wait()
        direction = "all => all.map(each => getComputedStyle(each).direction)"
        assert tab.page.locator(".answer .line").evaluate_all(direction) == ["rtl", "ltr", "rtl", "ltr"]
        assert tab.page.locator(".you .line").evaluate_all(direction) == ["rtl"]
        assert tab.page.locator("#list .open").evaluate_all(direction) == ["rtl"]
        assert tab.page.locator("#list .open").all_text_contents() == [title[:-1]], "no half of an emoji"
        set_up(tab.page, system=hebrew)
        assert tab.page.locator("#system").evaluate("each => getComputedStyle(each).direction") == "rtl"


def test_thinking_is_folded_and_reading_is_shown(browser: Any, server: Running) -> None:
    with opened(browser, server) as tab:
        thought = chunk({"reasoning_content": "let me see"}, {"tokens": [[3, "model"], [7, None]]})
        read = [chunk({}, {"reading": {"tokens": tokens, "of": 5000}}) for tokens in (0, 256)]
        scripted(tab.page, *read, thought, chunk({"content": "So."}), end())
        tab.page.evaluate(
            """() => {
              window.shown = [];
              const { waits } = Turn.prototype;
              Turn.prototype.waits = function (...told) { waits.apply(this, told); shown.push(told); };
            }"""
        )
        tab.ask("think")
        tab.wait()
        details = tab.page.locator("details.thought")
        assert details.evaluate("each => each.open") is False
        assert details.locator("div.body").evaluate("each => each.textContent") == "let me see"
        assert details.locator("i.drafter").evaluate("each => each.textContent") == "let"
        assert tab.answer == "So."
        _, first, second = tab.page.evaluate("() => shown")  # behind that it waits
        assert first == ["Reading 5,000 tokens", 0]
        assert re.fullmatch(r"Reading 5,000 tokens · 5 % · \d+ s left", second[0])
        assert second[1] == 256 / 5000
        assert tab.page.locator(".wait").count() == 0, "it is gone when the answer begins"


@pytest.mark.parametrize(
    ("own", "timings", "said"),
    [
        (
            {},
            {"draft_n": 20, "draft_n_accepted": 9, "predicted_per_second": 56.8},
            "56.8 tok/s · 1.42x faster than without guesses · 9 of 20 guesses right",
        ),
        (
            {},
            {"draft_n": 20, "predicted_per_second": 40.0},
            "40.0 tok/s · as fast as without guesses · 0 of 20 guesses right",
        ),
        (
            {},
            {"draft_n": 2, "predicted_per_second": 36.0},
            "36.0 tok/s · 0.90x the speed without guesses · 0 of 2 guesses right",
        ),
        ({}, {"draft_n": 2, "plain_per_second": None}, "50.0 tok/s · 0 of 2 guesses right"),
        ({"speculation_off": "no drafter is here"}, {}, "50.0 tok/s · no guesses: no drafter is here"),
        ({}, {}, "50.0 tok/s · no guesses: nothing to guess from yet"),
    ],
)
def test_the_line_under_an_answer_says_what_guesses_brought(
    browser: Any, server: Running, own: dict[str, Any], timings: dict[str, Any], said: str
) -> None:
    with opened(browser, server) as tab:
        scripted(tab.page, chunk({"content": "x"}), end(own, **timings))
        tab.ask("hello")
        tab.wait()
        assert tab.foot == said


def test_settings_are_sent_as_typed(browser: Any, server: Running) -> None:
    with opened(browser, server) as tab:
        scripted(tab.page, chunk({"content": "x"}), end())
        tab.ask("hello")
        tab.wait()
        assert tab.asked[0].keys() == {"messages", "stream", "edgespec"}, "an empty field leaves the model's own"
        set_up(tab.page, temperature=0.5, max_tokens=7, system="Be brief.")
        tab.ask("more")
        tab.wait()
        sent = tab.asked[1]
        assert (sent["temperature"], sent["max_tokens"]) == (0.5, 7)
        assert sent["messages"][0] == {"role": "system", "content": "Be brief."}


def test_enter_sends_and_shift_enter_does_not(browser: Any, server: Running) -> None:
    with opened(browser, server) as tab:
        scripted(tab.page, chunk({"content": "x"}), end())
        tab.page.fill("#text", "one")
        tab.page.press("#text", "Shift+Enter")
        tab.page.type("#text", "two")
        composing = """code => document.querySelector("#text").dispatchEvent(
          new KeyboardEvent("keydown", { key: "Enter", keyCode: code, bubbles: true, cancelable: true }))"""
        tab.page.evaluate(composing, 229)
        assert tab.asked == [], "the key ends a composition, in Safari too"
        tab.page.press("#text", "Enter")
        tab.wait()
        assert tab.asked[0]["messages"][-1]["content"] == "one\ntwo"
        assert tab.page.input_value("#text") == ""
        assert tab.page.evaluate("() => document.activeElement.id") == "text"


def test_an_error_is_shown_and_the_next_question_is_answered(browser: Any, server: Running) -> None:
    with opened(browser, server, console=("status of 400",)) as tab:
        set_up(tab.page, max_tokens=8)
        tab.ask("the " * 5000)
        tab.wait()
        assert "exceeds the available context size" in tab.page.locator("[role=alert]").inner_text()
        tab.page.reload()
        tab.ask("hello")
        tab.wait()
        assert len(tab.asked[-1]["messages"]) == 1, "what got no answer is not sent again"
        assert tab.answer


def test_a_stream_that_breaks_off_is_an_error(browser: Any, server: Running) -> None:
    with opened(browser, server) as tab:
        scripted(tab.page, chunk({"content": "half an"}))
        tab.ask("hello")
        tab.wait()
        assert "ended before the answer did" in tab.page.locator("[role=alert]").inner_text()
        assert "half an" in tab.answer
        broken: Any = {"error": {"message": "it broke here"}}
        scripted(tab.page, chunk({"content": "half an"}), chunk({}, finish_reason="error"), broken)
        tab.ask("hello")
        tab.wait()
        assert "it broke here" in tab.page.locator("[role=alert]").last.inner_text()


def test_a_key_is_asked_for_and_kept_for_the_tab_only(browser: Any, tiny: TinyModels) -> None:
    with running(lambda: tiny.load(depth=3), access=Access(keys=("a-long-key",))) as own:
        own.wait_until(lambda: own.service.keeper.state == "ready")
        with opened(browser, own, console=("status of 401",)) as tab:
            tab.page.fill("#key", "a-wrong-key")
            tab.page.click("text=Use this key")
            tab.page.wait_for_function("() => $('asking').open && !$('key').value")
            tab.page.fill("#key", "a-key-that-is-not-sent")
            tab.page.press("#key", "Escape")
            tab.page.wait_for_function("() => !$('asking').open")
            tab.page.reload()
            tab.page.fill("#key", "a-long-key")
            tab.page.press("#key", "Enter")
            tab.page.wait_for_function("() => document.querySelector('#model').textContent === 'tiny'")
            set_up(tab.page, max_tokens=4)
            tab.ask("hello")
            tab.wait()
            assert tab.answer
            assert "a-long-key" in tab.page.evaluate("() => JSON.stringify({ ...sessionStorage })")
            assert "a-long-key" not in tab.page.evaluate("() => JSON.stringify({ ...localStorage })")


def test_full_storage_drops_the_oldest_conversation(browser: Any, server: Running) -> None:
    with opened(browser, server) as tab:
        scripted(tab.page, chunk({"content": "x"}), end())
        tab.page.evaluate(
            """() => {
              for (let at = 1; at <= 5; at++) {
                const old = { id: String(at), at, turns: [{ role: "user", content: "y".repeat(1000000) }] };
                localStorage.setItem(`edgespec.conversation.${at}`, JSON.stringify(old));
              }
            }"""
        )
        tab.ask("z" * 400_000)
        tab.wait()
        kept = tab.page.evaluate("() => Object.keys(localStorage).filter(key => /[.][1-5]$/.test(key)).sort()")
        assert kept[-1] == "edgespec.conversation.5"
        assert len(kept) < 5
        tab.ask("z" * 6_000_000)
        tab.wait()
        assert tab.page.evaluate("() => Object.keys(localStorage).length") >= len(kept), (
            "what cannot be kept takes nothing"
        )
        tab.page.reload()
        assert tab.page.locator(".turn").count() == 2


def test_a_chunk_costs_a_long_answer_no_more_than_a_short_one(browser: Any, server: Running) -> None:
    """Script and layout of a chunk appended to 20 000 tokens, the median of 500."""
    with opened(browser, server) as tab:
        took = tab.page.evaluate(
            """() => {
              document.querySelector(".empty").remove();
              const turn = new Turn({ role: "assistant", content: "", runs: [], reasoning: "", reasoning_runs: [] });
              const kinds = ["model", null, "lookup", "model", null], times = [];
              for (let count = 0; count < 20500; count++) {
                const fence = count % 400 === 300 ? "\\n```\\n" : ` word${count % 97}`;
                const said = count % 15 === 14 ? "\\n" : fence;
                const began = performance.now();
                turn.adds(said, [[said.length, kinds[count % 5]]], "content", turn.data.runs, turn.words);
                turn.round({ proposed: 4, accepted: count % 5 });
                follow();
                log.getBoundingClientRect(); turn.article.offsetHeight;
                if (count >= 20000) times.push(performance.now() - began);
              }
              times.sort((one, other) => one - other);
              return times[times.length >> 1];
            }"""
        )
        assert took <= MOST_MS


def test_several_models_are_offered(browser: Any, server: Running) -> None:
    with opened(browser, server) as tab:
        listed = {"data": [{"id": "one", "meta": None}, {"id": "two", "meta": None}]}
        tab.page.route("**/v1/models", lambda route: route.fulfill(json=listed))
        scripted(tab.page, chunk({"content": "x"}), end())
        tab.page.reload()
        tab.page.select_option("#models", "two")
        tab.ask("hello")
        tab.wait()
        assert tab.asked[0]["model"] == "two"
        tab.page.reload()
        tab.page.wait_for_function("() => document.querySelector('#models').value === 'two'")


@pytest.mark.skipif(
    importlib.util.find_spec("axe_playwright_python") is None,
    reason="axe is not installed: pip install 'edgespec[browser]'",
)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("theme", THEMES)
def test_axe_finds_no_violation(browser: Any, server: Running, theme: str, width: int) -> None:
    from axe_playwright_python.sync_playwright import Axe

    def violations() -> list[str]:
        found = Axe().run(tab.page).response["violations"]
        return [f"{each['id']}: {each['help']} {[node['target'] for node in each['nodes']]}" for each in found]

    with opened(browser, server, color_scheme=theme, viewport={"width": width, "height": 800}) as tab:
        tab.page.wait_for_timeout(200)
        assert violations() == []
        thought = chunk({"reasoning_content": "hm"}, {"tokens": [[2, "model"]]})
        sources = ["model", "lookup", "history", "constraint", None]
        words = [
            chunk({"content": "word "}, {"tokens": [[5, each]], "round": {"proposed": 3, "accepted": 1}})
            for each in sources
        ]
        code = chunk({"content": "\n```python\n" + "x = 1  # a long line of code\n" * 3 + "y" * 300 + "\n```\n"})
        scripted(tab.page, chunk({}, {"reading": {"tokens": 0, "of": 400}}), thought, *words, code, end(draft_n=3))
        tab.ask("hello")
        tab.wait()
        tab.page.click("summary >> text=Thoughts")
        tab.page.click("summary >> text=Settings")
        assert violations() == []
        if width == min(WIDTHS):
            tab.page.click("#menu")
            tab.page.wait_for_timeout(300)
            assert violations() == []
            tab.page.keyboard.press("Escape")
        tab.page.evaluate("() => document.querySelector('#asking').showModal()")
        assert violations() == []
        assert tab.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
