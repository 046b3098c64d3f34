"""The long checks on real models: one table of steps, each with its commands and the predicate on their reports.

scripts/acceptance_run.py runs the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scripts import acceptance_predicates as p
from scripts.acceptance_predicates import Holds, each, every, identical, limits, only

Command = tuple[str, ...]

TARGET, DRAFTER, SMALL = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "smollm2-135m"


@dataclass(frozen=True)
class Step:
    """Commands that each print one JSON object, and whether the list of these reports fulfils the promise.

    In ``commands``, {work} is the step's temporary folder, {unseen} the suite of $UNSEEN_SUITE, and {target} the file
    of the default target. ``files`` are texts that are written into {work} first. ``fresh_home``: the commands share
    a new home that has only the models of the user's home.
    """

    name: str
    says: str
    commands: tuple[Command, ...]
    holds: Holds
    fresh_home: bool = False
    files: Mapping[str, str] = field(default_factory=dict)


def bench(*options: str) -> Command:
    return ("edgespec", "bench", "--profile", "laptop", "--max-tokens", "96", *options)


def ours(arms: str, *options: str) -> Command:
    return bench("--suite", "ours", "--limit", "3", "--arms", arms, *options)


def unseen(*options: str) -> Command:
    return bench("--suite", "{unseen}", "--passes", "2", "--arms", "again,planned", *options)


def export(model: str, to: str, quant: str, out: str, *options: str) -> Command:
    return ("edgespec", "export", model, "--to", to, "--quant", quant, "-o", out, *options)


def oracle(depths: range, *options: str) -> tuple[Command, ...]:
    """A drafter that is always right, as planned and at every fixed depth."""
    fixed = ",".join(f"oracle-depth-{depth}" for depth in depths)
    return (ours(f"again,oracle,{fixed}", "--limit", "1", "--passes", "1", *options),)


ORACLE_HOLDS = every(
    limits(("arms/oracle/speedup/geomean", ">=", 1.35)), each(p.oracle_depth_near_best), p.predicted("oracle")
)


def worst(tokens: str) -> Command:
    categories = ("--category", "chat", "--category", "code")
    return ours("again,worst", *categories, "--limit", "2", "--passes", "1", "--max-tokens", tokens)


def cold(suite: str, passes: str, tokens: str, *options: str) -> Command:
    """Whole requests: every prompt is read again for every answer."""
    return bench(
        "--suite", suite, "--cold", "--passes", passes, "--arms", "again,planned", "--max-tokens", tokens, *options
    )


def requests(suite: str) -> tuple[Command, ...]:
    return (bench("--suite", suite, "--cold", "--passes", "2", "--arms", "again,planned"),)


REQUESTS_HOLD = every(
    identical,
    limits(
        ("arms/planned/request_speedup/geomean", ">=", 1.08),
        ("arms/planned/request_speedup/by_category/*", "reaches", 0.98),
        ("arms/planned/ttft_ratio/geomean", "<=", 1.02),
    ),
)


def trim(source: str, to: str, quant: str, *target: str) -> tuple[Command, ...]:
    """Export with the whole and with a trimmed head, time both three times, and draft with both."""
    whole, trimmed = "{work}/whole", "{work}/trimmed"
    short = ("--category", "chat", "--limit", "1", "--passes", "1", "--max-tokens", "16")
    timed = bench(whole, "--draft", "none", "--compare", trimmed, "--arms", "again", *short)
    asked = ("--arms", "model-depth-2", "--limit", "2", "--passes", "1", "--max-tokens", "64")
    return (
        export(source, to, quant, whole),
        export(source, to, quant, trimmed, "--trim-vocab", "auto", *(("--trim-for", *target) if target else ())),
        *(timed,) * 3,
        *(bench(*target, "--draft", drafter, *asked) for drafter in (whole, trimmed)),
    )


TRIM_FASTER = every(only(2, 5, p.faster_trimmed), only(5, 7, identical))
TRIM_HOLDS = every(TRIM_FASTER, only(5, 7, p.loses_little))


# ONNX Runtime is as accurate as llama.cpp on the same weights, and no worse than with edgespec's cache.
ONNX_EQUALS_LLAMA = limits(
    ("tokens", "==", 4096),
    ("kl_tokens", "==", 512),
    *p.within("perplexity_ratio", 0.005),
    ("perplexity_ratio_our_cache", "<=", 1.005),
    ("kl_ratio", "<=", 1.5),
    ("kl_ratio_our_cache", "<=", 1.5),
)


def same_weights(model: str, quant: str) -> Step:
    """A quantised GGUF and its ONNX twin against the same weights as float32."""
    gguf, onnx, float32 = "{work}/gguf", "{work}/onnx", "{work}/float32"
    return Step(
        name=f"quality-{model}-{quant}",
        says=f"ONNX Runtime computes {model} with {quant} weights as accurately as llama.cpp.",
        commands=(
            export(model, "gguf", quant, gguf),
            export(gguf, "onnx", "keep", onnx),
            export(gguf, "gguf", "f32", float32),
            ("benchmarks/export_quality.py", gguf, onnx, float32),
        ),
        holds=every(only(1, 2, each(p.twin_has_the_same_weights)), only(3, 4, ONNX_EQUALS_LLAMA)),
    )


def native_quality(model: str) -> Step:
    return Step(
        name=f"native-quality-{model}",
        says=f"The native kernels compute {model} as accurately as llama.cpp.",
        commands=(
            export(model, "gguf", "f32", "{work}/float32"),
            ("benchmarks/native_quality.py", model, "{work}/float32"),
        ),
        holds=only(
            1,
            2,
            every(limits(*p.within("perplexity_ratio", 0.005), ("kl_ratio", "<=", 1)), each(p.agrees_with_llama)),
        ),
    )


def native_suite(*drafting: str) -> Command:
    return bench(
        "--suite", "ours", "--passes", "1", "--arms", "again,planned", "--compare", f"llama:{TARGET}", *drafting
    )


def first_answers(part: str) -> tuple[Command, ...]:
    return (("benchmarks/first_answers.py", "{unseen}", part),)


TRIM_TEXTS = tuple(
    option for text in ("README.md", "CHANGELOG.md", "edgespec/engine/session.py") for option in ("--trim-from", text)
)

# All 40 prompts are identical, with proposals.
VERIFIED = every(
    limits(("identical", "==", 40), ("prompts", "==", 40), ("proposed", ">", 0)), each(p.has_long_prompts)
)
# The limits find mistakes in the graph: another order of rounding costs 0.001 nats, bfloat16 in OpenVINO 0.003.
FIXED_SHAPES_HOLD = every(
    limits(
        ("devices/*/scores/mean_kl_nats", "<=", 0.02),
        ("devices/*/scores/agreeing", ">=", 0.9),
        ("devices/*/drafts/rounds_of_the_model", ">", 0),
        ("devices/*/drafts/accepted", ">", 0),
        ("devices/*/drafts/identical/*", "==", True),
    ),
    each(p.drafts_on_its_device),
)
BATCHES_HOLD = limits(
    ("answers", ">=", 200),
    ("clients/*/different", "==", []),
    *(
        (f"clients/{count}/{key}", ">", 0)
        for count in (2, 4, 8)
        for key in ("with_other_answers", "with_a_prompt", "alternatives")
    ),
)

STEPS: tuple[Step, ...] = (
    Step(
        "busy-thread",
        "Decoding while a Python thread is busy reaches 90 % of decoding while a process is busy.",
        (("benchmarks/busy_thread.py",),),
        limits(("thread_over_process_median", ">=", 0.9)),
    ),
    Step(
        "near",
        "At a requested depth outside the stable widths, every divergence is within the reported bound.",
        (
            ("edgespec", "verify", "--profile", "{work}/llama.toml", "--set", "exactness=near", "--set", "depth=5",
             "--prompts", "6"),
        ),
        every(limits(("level", "==", "N"), ("proposed", ">", 0)), each(p.divergences_within_bound)),
        files={"llama.toml": 'inherits = "laptop"\nruntime = "llama"\n'},
    ),
    Step(
        "native-equality",
        "Serial drafting in the native kernels gives plain decoding's tokens, greedy and sampled, at every depth.",
        (("edgespec", "verify", "--profile", "{work}/serial.toml", "--prompts", "40"),),
        every(VERIFIED, each(p.as_deep_as_eight)),
        files={"serial.toml": 'inherits = "laptop"\nmode = "serial"\nruntime = "native"\n'},
    ),
    Step(
        "pipelined-equality",
        "Pipelined drafting gives plain decoding's tokens, greedy and sampled, at every depth.",
        (("edgespec", "verify", "--profile", "{work}/pipelined.toml", "--prompts", "40", "--max-tokens", "64"),),
        every(VERIFIED, limits(("level", "==", "W"))),
        files={"pipelined.toml": 'inherits = "laptop"\nmode = "pipelined"\n'},
    ),
    Step(
        "export-transformers",
        "Exported Hugging Face folders compute what transformers computes.",
        (("benchmarks/transformers_logits.py",),),
        every(
            limits(("kinds/*/largest_difference", "<", 1e-3), ("kinds/*/spread", ">", 0.1)),
            each(p.near_llama_logits),
        ),
    ),
    *(same_weights(model, quant) for model in (SMALL, DRAFTER) for quant in ("q8_0", "q4_0")),
    Step(
        "export-q4",
        "A 4-bit ONNX export is at most 1.15 times a Q4_0 GGUF and reports its perplexity.",
        tuple(
            export(model, to, quant, f"{{work}}/{model}-{to}")
            for model in (SMALL, DRAFTER)
            for to, quant in (("onnx", "q4"), ("gguf", "q4_0"))
        ),
        p.small_in_four_bits,
    ),
    Step(
        "static-cache",
        "A drafter of fixed shapes drafts on the processor, and through OpenVINO where the processor is its device.",
        (
            export(DRAFTER, "onnx", "keep", "{work}/usual"),
            export(DRAFTER, "onnx", "keep", "{work}/fixed", "--static-cache", "1024"),
            ("benchmarks/static_scores.py", "{work}/usual", "{work}/fixed"),
        ),
        only(2, 3, FIXED_SHAPES_HOLD),
    ),
    Step(
        "trim-gguf",
        "The default drafter in 4 bits is 1.25 times faster with a trimmed head and loses at most 5 points.",
        trim(DRAFTER, "gguf", "q4_0"),
        TRIM_HOLDS,
    ),
    Step(
        "trim-onnx",
        "The same as ONNX in 4 bits.",
        trim(DRAFTER, "onnx", "q4"),
        TRIM_HOLDS,
    ),
    Step(
        "trim-gemma",
        "A model that is mostly head drafts for itself 1.25 times faster; its acceptance is only reported.",
        trim("gemma3-270m", "gguf", "keep", "gemma3-270m"),
        TRIM_FASTER,
    ),
    Step(
        "sleeping-drafter",
        "With a drafter that only sleeps, pipelined rounds reach what the times of their parts allow.",
        (("benchmarks/sleeping_drafter.py",),),
        limits(
            ("ratios/*/identical", "==", True),
            ("ratios/*/of_bound", ">=", 0.9),
            *p.within("ratios/*/gain_of_simulated", 0.1),
        ),
    ),
    Step(
        "pipelined-one-device",
        "On one device the plan is serial or plain, because both models slow each other down.",
        (
            bench("--arms", "again,planned,model-depth-2,pipelined-depth-2", "--limit", "1", "--passes", "2",
                  "--max-tokens", "64"),
        ),
        every(identical, limits(("plan/mode", "!=", "pipelined")), each(p.reasons_name_the_slowdown)),
    ),
    Step(
        "native-speed",
        "The native kernels are as fast as llama.cpp in its fastest setting, and twice as fast on prompts.",
        (("benchmarks/native_against_llama.py", "{target}"),),
        limits(
            ("plain_speedup_over_fastest_llama", ">=", 1),
            ("prompt_speedup_over_fastest_llama", ">=", 2),
            ("ratio_to_plain/native/4", "<=", 1.25),
            ("ratio_to_plain/native/8", "<=", 1.9),
        ),
    ),
    Step(
        "native-levels",
        "The times of every instruction set of this processor, except portable C, are measured.",
        (("benchmarks/kernels.py", "{target}", "--level", "all", "--passes", "5"),),
        each(bool),
    ),
    Step(
        "native-memory",
        "Peak memory and loading times of the native kernels are within their limits.",
        (("benchmarks/native_memory.py", "{target}"),),
        limits(
            ("peak_over_limit", "<=", 1),
            ("runs/sidecar_written/load_s", "<=", 6),
            ("runs/sidecar_mapped/load_s", "<=", 1),
        ),
    ),
    *(native_quality(model) for model in (TARGET, DRAFTER, SMALL, "gemma3-270m")),
    Step(
        "native-rows",
        "A row has the same bits at every width, position and number of threads.",
        (("benchmarks/native_rows.py", TARGET),),
        limits(("compared", ">", 0), ("unequal", "==", [])),
    ),
    Step(
        "native-suite-stock",
        "With the published drafter the suite is 1.3 times faster than llama.cpp's plain decoding.",
        (native_suite(),),
        every(identical, p.faster_than_llama(1.3)),
    ),
    Step(
        "native-suite-trimmed",
        "With a trimmed 4-bit drafter the suite is 1.45 times faster than llama.cpp's plain decoding.",
        (
            export(DRAFTER, "gguf", "q4_0", "{work}/drafter", "--trim-vocab", "auto"),
            native_suite("--draft", "{work}/drafter"),
        ),
        only(1, 2, every(identical, p.faster_than_llama(1.45))),
    ),
    Step(
        "sampling-draws",
        "On a million rows every instruction set and numpy draw the token of the specification.",
        (("benchmarks/draws_checked.py",),),
        every(limits(("different", "==", [])), each(p.all_rows_drawn)),
    ),
    Step(
        "random-drafts",
        "100 000 tokens with random drafts, in caches saved, branched and rewound, are plain decoding's.",
        tuple(
            ("benchmarks/random_drafts.py", "--model", model)
            for model in ("qwen3moe", "gemma3", "gpt-oss", "qwen35", "gemma4")
        ),
        limits(("different_texts", "==", 0), ("compared", ">=", 100_000)),
    ),
    Step(
        "forms",
        "Answers of 300 random schemas and calls of 100 random sets of tools are valid, and masks follow steps back.",
        (("benchmarks/forms_checked.py",),),
        limits(
            ("strict/refused", "==", []),
            ("strict/finished", ">=", 270),
            ("strict/invalid", "==", []),
            ("lenient/accepted_strictly", "==", 0),
            ("lenient/without_warning", "==", []),
            ("tools/finished_share", ">=", 0.9),
            ("tools/invalid", "==", []),
            ("cursors/steps", "==", 100_000),
            ("cursors/different", "==", []),
        ),
    ),
    Step(
        "form-first-token",
        "A form that is compiled delays the first token by at most 5 ms.",
        (("benchmarks/structured.py", "--first-tokens", "--limit", "20"),),
        limits(("first_token_later_ms", "<=", 5)),
    ),
    Step(
        "form-clients",
        "openai, instructor, pydantic-ai, LangChain, LlamaIndex and DSPy get objects of their classes.",
        (("benchmarks/form_clients.py",),),
        limits(("programs", "has", 6), ("programs/*/works", "==", True), ("programs/*/right", "==", True)),
    ),
    Step(
        "requests-short",
        "Whole requests with short prompts are 1.08 times faster, and the first token is at most 2 % later.",
        requests("short"),
        REQUESTS_HOLD,
    ),
    Step(
        "requests-unseen",
        "Whole requests on the unseen suite are 1.08 times faster, and the first token is at most 2 % later.",
        requests("{unseen}"),
        REQUESTS_HOLD,
    ),
    Step(
        "short-answers",
        "Answers of at most 8, 16 and 32 tokens to prompts of 300 to 3000 tokens are not slower than plain.",
        (
            ("benchmarks/prompt_lengths.py", "{work}/lengths.jsonl"),
            *(cold("{work}/lengths.jsonl", "2", tokens) for tokens in ("8", "16", "32")),
        ),
        only(1, 4, every(identical, limits(("arms/planned/request_speedup/by_category/*/geomean", ">=", 0.96)))),
    ),
    Step(
        "decode-unseen",
        "Decoding the unseen suite is 1.42 times faster, and no category is slower than plain.",
        (unseen(),),
        every(
            identical,
            limits(
                ("arms/planned/speedup/geomean", ">=", 1.42),
                ("arms/planned/speedup/by_category/*", "reaches", 1.0),
            ),
        ),
    ),
    Step(
        "sampled-unseen",
        "Sampled decoding keeps most of greedy's gain and is not slower than plain.",
        (
            unseen("--limit", "2"),
            unseen("--limit", "2", "--temperature", "0.7", "--top-p", "0.95"),
            unseen("--limit", "2", "--temperature", "1.0", "--top-k", "40"),
            unseen("--limit", "2", "--temperature", "1.0", "--min-p", "0.05"),
        ),
        every(identical, p.sampled_keeps_gain),
    ),
    Step(
        "first-answers",
        "In a home without measurements the first process drafts and is not slower, and the second one gains.",
        first_answers("first"),
        limits(
            ("identical", "==", True),
            ("drafted", "==", True),
            ("first", ">=", 1.0),
            ("second", ">=", 1.15),
            ("by_category/coding", ">=", 1.3),
            ("by_category/*", ">=", 0.97),
        ),
    ),
    Step(
        "cut-after-a-purchase",
        "An answer that ends right after its first round with the drafter takes at most 1 / 0.88 of plain's time.",
        first_answers("cut"),
        limits(("ratios", "has", 10), ("ratios/*", ">=", 0.88)),
        fresh_home=True,
    ),
    Step(
        "order",
        "Tokens a round of code and of translations do not depend on the order of the processes.",
        first_answers("order"),
        each(p.order_changes_little),
    ),
    Step(
        "one-text",
        "The text is the same with every drafter, before and after calibrations.",
        (
            export(DRAFTER, "gguf", "q4_0", "{work}/trimmed", "--trim-vocab", "40960", *TRIM_TEXTS),
            export(DRAFTER, "onnx", "q4", "{work}/onnx"),
            ("benchmarks/one_text.py", "{unseen}", "{work}/trimmed", "{work}/onnx"),
        ),
        only(2, 3, every(limits(("different", "==", [])), each(p.exported_drafters_propose))),
        fresh_home=True,
    ),
    Step(
        "leaving",
        "Leaving an answer takes at most 150 ms at every moment.",
        (("benchmarks/leaving.py",),),
        limits(("longest_s/*/*", "<=", 0.15)),
    ),
    Step(
        "batched-answers",
        "Two hundred answers, computed 2, 4 and 8 at a time, have the tokens that they have alone.",
        (("benchmarks/batched_answers.py",),),
        BATCHES_HOLD,
    ),
    Step(
        "batched-clients",
        "Four clients together are 2.6 times as fast as one's plain decoding, and 1.5 times as one as planned.",
        (("benchmarks/batched_clients.py", "--clients", "1,2,4", "--tokens", "64"),),
        limits(("times_plain/4 planned", ">=", 2.6), ("times_planned/4 planned", ">=", 1.5)),
    ),
    Step(
        "beginnings",
        "An agent's 18 905 tokens come from the disk: the first token within 2 s, and the text that was read.",
        (("benchmarks/beginnings.py",),),
        limits(("from_disk_s", "<=", 2.0), ("same_text", "==", True), ("all_from_disk", "==", True)),
    ),
    Step(
        "prompts-under-load",
        "Answers keep 0.7 of their speed while a prompt is read, and a second client's first token comes in time.",
        (("benchmarks/prompts_under_load.py",),),
        limits(
            ("ttft_p95_ratio", "<=", 2.2),
            ("while_reading/*/kept", ">=", 0.70),
            ("while_reading/*/longest_gap_s", "<=", 0.25),
        ),
    ),
    Step(
        "fill-in",
        "Holes in our own sources have the same text with drafts, and the second key's first token comes in a tenth.",
        (("benchmarks/fill_in.py",),),
        limits(("different", "<=", 0), ("second_key_ratio", "<=", 0.1)),
    ),
    Step(
        "request-sizes",
        "The largest requests take time in proportion to their size, delay no stream, and free their place soon.",
        (("benchmarks/request_sizes.py",),),
        limits(
            ("ratios/*", "<=", 2.6),
            ("contexts/*/bodies/*/gap_s", "<=", 0.05),
            ("contexts/*/reply/gap_s", "<=", 0.05),
            ("contexts/*/place_s/*", "<=", 0.2),
        ),
    ),
    Step(
        "agents",
        "Claude Code, Codex and opencode, as the guide sets them up, have a tool run and say what it found.",
        (("benchmarks/agents.py",),),
        limits(("agents", "has", 3), ("agents/*/said", "==", True), ("agents/*/status", "==", 0)),
        fresh_home=True,
    ),
    Step(
        "agent-turns",
        "Conversations of three agents with a tool turn, of 7 271 to 18 905 tokens, are answered as without guesses.",
        (("benchmarks/agent_turns.py",),),
        limits(
            ("agents", "has", 3),
            ("agents/*/near_recorded", "==", True),
            ("agents/*/right", "==", True),
            ("agents/*/as_plain", "==", True),
        ),
    ),
    Step(
        "openai-programs",
        "openai-agents, instructor and pydantic-ai work unchanged, by responses and by chat completions.",
        (("benchmarks/openai_programs.py",),),
        limits(("holds", "has", 3), ("holds/*/*", "==", True)),
    ),
    Step(
        "ollama-programs",
        "langchain-ollama and llm work unchanged, and get the texts of chat completions.",
        (("benchmarks/ollama_programs.py",),),
        limits(("holds/*", "==", True)),
    ),
    Step(
        "page",
        "In a real Chromium the server's page shows, keeps, sends and refuses what its guide says.",
        (("benchmarks/page.py",),),
        limits(("passed", ">=", 26), ("failed", "==", 0), ("skipped", "==", 0)),
    ),
    Step(
        "openapi",
        "To whatever Schemathesis sends to its routes, the server answers as its OpenAPI document says.",
        (("benchmarks/openapi_checked.py",),),
        limits(
            ("tested", ">=", 29),
            ("requests", ">=", 5000),
            ("failures", "has", 0),
            ("errors", "has", 0),
            ("runs_on", "==", True),
        ),
    ),
    Step(
        "face-clients",
        "Two hundred answers of all APIs, to 2, 4 and 8 clients, have the token ids that they have alone.",
        (("benchmarks/face_clients.py",),),
        limits(
            ("clients/*/answers", "==", 200),
            ("clients/*/other_ids", "has", 0),
            ("clients/*/other_replies", "has", 0),
            ("clients", "has", 3),
            ("paths", "has", 7),
            ("refused", "has", 0),
        ),
    ),
    Step(
        "mixed-traffic",
        "For an hour every client of every API gets the text it gets alone, and the server keeps nothing.",
        (("benchmarks/mixed_traffic.py", "--minutes", "60"),),
        every(
            limits(
                ("requests/*", ">", 0),
                ("requests", "has", 8),
                ("answers/*", ">", 0),
                ("answers", "has", 16),
                ("refused_alone", "has", 0),
                ("wrong", "==", 0),
                ("failed", "==", 0),
                ("stuck", "==", 0),
                ("same_afterwards", "==", True),
            ),
            each(p.server_keeps_nothing),
            each(p.memory_stays_flat),
        ),
    ),
    Step(
        "forgotten",
        "Answers that the caller drops leave no object, no thread and no memory behind.",
        (("benchmarks/forgotten.py",),),
        limits(
            ("forms/*/left", "==", 0),
            ("forms/*/threads_more", "<=", 0),
            ("forms/*/bytes_more", "<", 32 * 2**20),  # 500 kept answers would take 50 MB
        ),
    ),
    Step(
        "faults",
        "What can go wrong on two cores of Linux goes wrong for real, and ends well, in at most 20 minutes.",
        (("benchmarks/faults.py",),),
        limits(("rows", "has", 26), ("rows/*/passed", ">", 0), ("rows/*/failed", "==", 0), ("seconds", "<=", 1200)),
    ),
    Step(
        "interrupts",
        "Ctrl-C ends every command with one line, at any of 2,000 moments.",
        (("benchmarks/interrupts.py",),),
        limits(("moments", ">=", 2000), ("wrong", "has", 0)),
    ),
    Step(
        "calibrate-busy",
        "`calibrate --quick` takes at most a minute while every processor is busy.",
        (("benchmarks/calibrate_busy.py",),),
        limits(("runs", "has", 3), ("runs/*/command_s", "<=", 60)),
        fresh_home=True,
    ),
    Step(
        "held-plans",
        "After calibrations beside busy programs, and with wrong measurements, answers are as fast as without any.",
        (("benchmarks/held_plans.py", "{unseen}", "--prompts", "24", "--max-tokens", "160"),),
        limits(("identical", "==", True), ("ratios", "has", 6), ("ratios/*", ">=", 0.95)),
    ),
    Step(
        "calibrate",
        "`calibrate --quick` takes at most a minute.",
        (("edgespec", "calibrate", "--quick", "--profile", "laptop"),),
        limits(("took_s", "<=", 60)),
    ),
    Step(
        "bench-quick",
        "In our suite no category is slower than plain.",
        (ours("again,planned"),),
        every(identical, limits(("speedup/by_category/*/geomean", ">=", 0.97))),
    ),
    Step(
        "bench-oracle-stable",
        "A drafter that is always right gains 1.35 at about the best depth of the stable widths, as predicted.",
        oracle(range(1, 3)),
        every(identical, ORACLE_HOLDS),
    ),
    Step(
        "bench-oracle-near",
        "The same with near exactness, up to depth 6.",
        oracle(range(1, 7), "--set", "exactness=near"),
        ORACLE_HOLDS,
    ),
    Step(
        "bench-copy-heavy",
        "Copies of the text gain 1.15 where the answer repeats the text, as predicted.",
        (ours("again,planned,lookup,depth-2", "--category", "code-edit", "--max-tokens", "192"),),
        every(
            identical,
            limits(("arms/lookup/speedup/geomean", ">=", 1.15)),
            p.predicted("lookup"),
            p.predicted("depth-2"),
        ),
    ),
    Step(
        "bench-worst",
        "A drafter that is never right costs under 5 % of 128 tokens and under 3 % of 512.",
        (worst("128"), worst("512")),
        every(
            identical,
            only(0, 1, limits(("arms/worst/speedup/geomean", ">=", 0.95))),
            only(1, 2, limits(("arms/worst/speedup/geomean", ">=", 0.97))),
        ),
    ),
    Step(
        "bench-requests",
        "Whole requests with long prompts, and their first token, are not slower than plain.",
        (
            cold("long-prompts", "1", "16"),
            cold("long-prompts", "1", "128"),
            cold("long-prompts", "1", "512", "--limit", "1"),
        ),
        every(
            identical,
            limits(
                ("arms/planned/request_speedup/geomean", ">=", 0.97),
                ("arms/planned/ttft_ratio/geomean", "<=", 1.03),
            ),
        ),
    ),
    Step(
        "bench-regret",
        "With near exactness the plan loses at most 5 % to the best fixed depth in every category.",
        (
            ours("again,planned,depth-1,depth-2,depth-3,depth-4,depth-5,depth-6", "--limit", "1", "--passes", "1",
                  "--set", "exactness=near", "--max-tokens", "64"),
        ),
        limits(("regret/*/loss", "<=", 0.05)),
    ),
)  # fmt: skip
