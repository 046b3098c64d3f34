"""The long checks on real models: one table of steps, each with its commands and the predicate on their reports.

scripts/acceptance_run.py runs the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scripts import acceptance_predicates as p
from scripts.acceptance_predicates import Holds, at_least, at_most, each, every, identical, only

Command = tuple[str, ...]

TARGET, DRAFTER, SMALL = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "smollm2-135m"
QUESTION = "What is a hash map? One sentence."


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
    return ("edgespec", "bench", "--profile", "laptop", *options)


def quick(arms: str, *options: str) -> Command:
    return bench("--suite", "quick", "--arms", arms, *options)


def unseen(*options: str) -> Command:
    return bench("--suite", "{unseen}", "--passes", "2", "--arms", "again,planned", *options)


def export(model: str, to: str, quant: str, out: str, *options: str) -> Command:
    return ("edgespec", "export", model, "--to", to, "--quant", quant, "-o", out, *options)


def generate(target: str, *options: str) -> Command:
    return ("edgespec", "generate", QUESTION, "--target", target, "--max-tokens", "32", *options)


def oracle(depths: range, *options: str) -> tuple[Command, ...]:
    """A drafter that is always right, as planned and at every fixed depth."""
    fixed = ",".join(f"oracle-depth-{depth}" for depth in depths)
    return (quick(f"again,oracle,{fixed}", "--limit", "1", "--passes", "1", *options),)


ORACLE_HOLDS = every(
    at_least(1.35, "arms", "oracle", "speedup", "geomean"), each(p.oracle_depth_near_best), p.predicted("oracle")
)


def worst(tokens: str) -> Command:
    categories = ("--category", "chat", "--category", "code")
    return quick("again,worst", *categories, "--limit", "2", "--passes", "1", "--max-tokens", tokens)


def cold(suite: str, passes: str, tokens: str, *options: str) -> Command:
    """Whole requests: every prompt is read again for every answer."""
    return bench(
        "--suite", suite, "--cold", "--passes", passes, "--arms", "again,planned", "--max-tokens", tokens, *options
    )


def requests(suite: str) -> tuple[Command, ...]:
    return (bench("--suite", suite, "--cold", "--passes", "2", "--arms", "again,planned"),)


REQUESTS_HOLD = every(
    identical,
    at_least(1.08, "arms", "planned", "request_speedup", "geomean"),
    p.categories_not_below(0.98, "arms", "planned", "request_speedup"),
    at_most(1.02, "arms", "planned", "ttft_ratio", "geomean"),
)


def trim(source: str, to: str, quant: str, *target: str) -> tuple[Command, ...]:
    """Export with the whole and with a trimmed head, time both three times, and draft with both."""
    whole, trimmed = "{work}/whole", "{work}/trimmed"
    short = ("--category", "chat", "--limit", "1", "--passes", "1", "--max-tokens", "16")
    timed = bench("--target", whole, "--draft", "none", "--compare", trimmed, "--arms", "again", *short)
    asked = ("--arms", "model-depth-2", "--limit", "2", "--passes", "1", "--max-tokens", "64")
    return (
        export(source, to, quant, whole),
        export(source, to, quant, trimmed, "--trim-vocab", "auto", *target),
        *(timed,) * 3,
        *(bench(*target, "--draft", drafter, *asked) for drafter in (whole, trimmed)),
    )


TRIM_FASTER = every(only(2, 5, p.faster_trimmed), only(5, 7, identical))
TRIM_HOLDS = every(TRIM_FASTER, only(5, 7, p.loses_little))


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
        holds=every(only(1, 2, each(p.twin_has_the_same_weights)), only(3, 4, each(p.onnx_equals_llama))),
    )


def native_quality(model: str) -> Step:
    return Step(
        name=f"native-quality-{model}",
        says=f"The native kernels compute {model} as accurately as llama.cpp.",
        commands=(
            export(model, "gguf", "f32", "{work}/float32"),
            ("benchmarks/native_quality.py", model, "{work}/float32"),
        ),
        holds=only(1, 2, each(p.native_equals_llama)),
    )


def native_suite(*drafting: str) -> Command:
    return bench(
        "--suite", "ours", "--passes", "1", "--arms", "again,planned", "--compare", f"llama:{TARGET}", *drafting
    )


def first_answers(part: str) -> tuple[Command, ...]:
    return (("benchmarks/first_answers.py", "{unseen}", part),)


OPTIMUM_EXPORTS = tuple(
    command
    for quant in ("keep", "q4")
    for command in (
        export("{work}/smollm2", "onnx", quant, f"{{work}}/{quant}"),
        generate(f"{{work}}/{quant}", "--plain"),
        generate(SMALL, "--draft", f"{{work}}/{quant}", "--depth", "3"),
    )
)
TRIM_TEXTS = tuple(
    option for text in ("README.md", "CHANGELOG.md", "edgespec/engine/session.py") for option in ("--trim-from", text)
)

STEPS: tuple[Step, ...] = (
    Step(
        "busy-thread",
        "Decoding while a Python thread is busy reaches 90 % of decoding while a process is busy.",
        (("benchmarks/busy_thread.py",),),
        at_least(0.9, "thread_over_process_median"),
    ),
    Step(
        "near",
        "At a requested depth outside the stable widths, every divergence is within the reported bound.",
        (
            ("edgespec", "verify", "--profile", "{work}/llama.toml", "--exactness", "near", "--depth", "5",
             "--prompts", "6"),
        ),
        each(p.near_within_bound),
        files={"llama.toml": 'inherits = "laptop"\nruntime = "llama"\n'},
    ),
    Step(
        "native-equality",
        "Serial drafting in the native kernels gives plain decoding's tokens, greedy and sampled, at every depth.",
        (("edgespec", "verify", "--profile", "{work}/serial.toml", "--prompts", "40"),),
        every(each(p.verified), each(p.as_deep_as_eight)),
        files={"serial.toml": 'inherits = "laptop"\nmode = "serial"\nruntime = "native"\n'},
    ),
    Step(
        "pipelined-equality",
        "Pipelined drafting gives plain decoding's tokens, greedy and sampled, at every depth.",
        (("edgespec", "verify", "--profile", "{work}/pipelined.toml", "--prompts", "40", "--max-tokens", "64"),),
        every(each(p.verified), each(p.bitwise)),
        files={"pipelined.toml": 'inherits = "laptop"\nmode = "pipelined"\n'},
    ),
    Step(
        "export-transformers",
        "Exported Hugging Face folders compute what transformers computes.",
        (("benchmarks/transformers_logits.py",),),
        each(p.same_logits),
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
        "optimum-chats",
        "A folder exported with Optimum answers as the same weights do in llama.cpp, and drafts for the GGUF.",
        (
            ("benchmarks/hf_folder.py", SMALL, "{work}/smollm2"),
            export("{work}/smollm2", "gguf", "keep", "{work}/gguf"),
            generate("{work}/gguf", "--plain"),
            generate(SMALL, "--plain"),
            *OPTIMUM_EXPORTS,
        ),
        only(2, 10, p.optimum_answers),
    ),
    Step(
        "static-cache",
        "A drafter of fixed shapes drafts on the processor, and through OpenVINO where the processor is its device.",
        (
            export(DRAFTER, "onnx", "keep", "{work}/usual"),
            export(DRAFTER, "onnx", "keep", "{work}/fixed", "--static-cache", "1024"),
            ("benchmarks/static_scores.py", "{work}/usual", "{work}/fixed"),
        ),
        only(2, 3, each(p.fixed_shapes_hold)),
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
        trim("gemma3-270m", "gguf", "keep", "--target", "gemma3-270m"),
        TRIM_FASTER,
    ),
    Step(
        "sleeping-drafter",
        "With a drafter that only sleeps, pipelined rounds reach what the times of their parts allow.",
        (("benchmarks/sleeping_drafter.py",),),
        each(p.reaches_its_bound),
    ),
    Step(
        "pipelined-one-device",
        "On one device the plan is serial or plain, because both models slow each other down.",
        (
            bench("--arms", "again,planned,model-depth-2,pipelined-depth-2", "--limit", "1", "--passes", "2",
                  "--max-tokens", "64"),
        ),
        every(identical, each(p.one_device_is_not_pipelined)),
    ),
    Step(
        "native-speed",
        "The native kernels are as fast as llama.cpp in its fastest setting, and twice as fast on prompts.",
        (("benchmarks/native_against_llama.py", "{target}"),),
        each(p.native_is_fast),
    ),
    Step(
        "native-levels",
        "The times of every instruction set of this processor, except portable C, are measured.",
        (("benchmarks/kernels.py", "{target}", "--level", "all", "--passes", "5"),),
        each(p.measured),
    ),
    Step(
        "native-memory",
        "Peak memory and loading times of the native kernels are within their limits.",
        (("benchmarks/native_memory.py", "{target}"),),
        each(p.memory_within_limits),
    ),
    *(native_quality(model) for model in (TARGET, DRAFTER, SMALL, "gemma3-270m")),
    Step(
        "native-rows",
        "A row has the same bits at every width, position and number of threads.",
        (("benchmarks/native_rows.py", TARGET),),
        each(p.rows_equal),
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
        each(p.draws_equal),
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
        only(1, 4, every(identical, p.categories_at_least(0.96, "arms", "planned", "request_speedup"))),
    ),
    Step(
        "decode-unseen",
        "Decoding the unseen suite is 1.42 times faster, and no category is slower than plain.",
        (unseen(),),
        every(
            identical,
            at_least(1.42, "arms", "planned", "speedup", "geomean"),
            p.categories_not_below(1.0, "arms", "planned", "speedup"),
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
        each(p.second_process_gains),
        fresh_home=True,
    ),
    Step(
        "cut-after-a-purchase",
        "An answer that ends right after its first round with the drafter takes at most 1 / 0.88 of plain's time.",
        first_answers("cut"),
        each(p.cut_answers_lose_little),
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
        only(2, 3, each(p.same_with_every_drafter)),
        fresh_home=True,
    ),
    Step(
        "leaving",
        "Leaving an answer takes at most 150 ms at every moment.",
        (("benchmarks/leaving.py",),),
        each(p.left_quickly),
    ),
    Step(
        "server-clients",
        "litellm, LangChain, llm and schemathesis work with `edgespec serve` unchanged.",
        (("benchmarks/server_clients.py",),),
        each(p.every_client_works),
    ),
    Step(
        "batched-answers",
        "Two hundred answers, computed 2, 4 and 8 at a time, have the tokens that they have alone.",
        (("benchmarks/batched_answers.py",),),
        each(p.batches_change_nothing),
    ),
    Step(
        "batched-clients",
        "Four clients together are 2.6 times as fast as one's plain decoding, and 1.5 times as one as planned.",
        (("benchmarks/batched_clients.py", "--clients", "1,2,4", "--tokens", "64"),),
        every(at_least(2.6, "times_plain", "4 planned"), at_least(1.5, "times_planned", "4 planned")),
    ),
    Step(
        "prompts-under-load",
        "Answers keep 0.7 of their speed while a prompt is read, and a second client's first token comes in time.",
        (("benchmarks/prompts_under_load.py",),),
        each(p.prompts_ride_along),
    ),
    Step(
        "mixed-traffic",
        "For an hour every client of a server gets the text it gets alone, and the server keeps nothing.",
        (("benchmarks/mixed_traffic.py", "--minutes", "60"),),
        each(p.traffic_changes_nothing),
    ),
    Step(
        "forgotten",
        "Answers that the caller drops leave no object, no thread and no memory behind.",
        (("benchmarks/forgotten.py",),),
        each(p.nothing_remains),
    ),
    Step(
        "saved-sessions",
        "Twenty saved sessions of the default pair continue bit for bit in another process, and read nothing again.",
        (("benchmarks/saved_sessions.py",),),
        each(p.sessions_continue),
    ),
    Step(
        "calibrate-busy",
        "`calibrate --quick` takes at most a minute while every processor is busy.",
        (("benchmarks/calibrate_busy.py",),),
        each(p.every_run_within_a_minute),
        fresh_home=True,
    ),
    Step(
        "calibrate",
        "`calibrate --quick` takes at most a minute.",
        (("edgespec", "calibrate", "--quick", "--profile", "laptop"),),
        at_most(60, "took_s"),
    ),
    Step(
        "bench-quick",
        "In the quick suite no category is slower than plain.",
        (quick("again,planned"),),
        every(identical, p.categories_at_least(0.97, "speedup")),
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
        oracle(range(1, 7), "--exactness", "near"),
        ORACLE_HOLDS,
    ),
    Step(
        "bench-copy-heavy",
        "Copies of the text gain 1.15 where the answer repeats the text, as predicted.",
        (quick("again,planned,lookup,depth-2", "--category", "code-edit", "--max-tokens", "192"),),
        every(
            identical,
            at_least(1.15, "arms", "lookup", "speedup", "geomean"),
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
            only(0, 1, at_least(0.95, "arms", "worst", "speedup", "geomean")),
            only(1, 2, at_least(0.97, "arms", "worst", "speedup", "geomean")),
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
            at_least(0.97, "arms", "planned", "request_speedup", "geomean"),
            at_most(1.03, "arms", "planned", "ttft_ratio", "geomean"),
        ),
    ),
    Step(
        "bench-regret",
        "With near exactness the plan loses at most 5 % to the best fixed depth in every category.",
        (
            quick("again,planned,depth-1,depth-2,depth-3,depth-4,depth-5,depth-6", "--limit", "1", "--passes", "1",
                  "--exactness", "near", "--max-tokens", "64"),
        ),
        each(lambda report: all(own["loss"] <= 0.05 for own in report["regret"].values())),
    ),
    Step(
        "fresh-clone",
        "The README's commands work in a new clone with an empty home, and `make test` passes.",
        (("benchmarks/fresh_clone.py",),),
        each(p.clone_works),
    ),
)  # fmt: skip
