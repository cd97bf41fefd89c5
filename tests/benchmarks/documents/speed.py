"""Blocks about time, throughput and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from serving.loadtest.arrivals import poisson
from serving.loadtest.measures import SATURATED
from tests.benchmarks.catalogue import BENCHMARKS
from tests.benchmarks.documents.records import (
    MACHINES,
    Record,
    aim,
    cell,
    judged,
    markdown,
    measured,
    number,
    record,
    records,
)

FIRST = "B"  # the machine of the first page: the faster one, where the margins are smaller
RAG_ARMS = {
    "prefix": "vLLM, prefix caching",
    "auto-placed": "`auto`, pages ordered by the service",
    "auto": "`auto`, pages as sent",
    "mpic-32": "`mpic-32`, as sent",
    "cacheblend-15": "`cacheblend-15`, as sent",
    "full-reuse": "`full-reuse`, as sent",
}
ONE_SHOT_ARMS = {"prefix": "vLLM, prefix caching", "off": "`off`", "auto": "`auto`"}
PLANS = {
    "static": "as many as the peak needs",
    "oracle": "what a moment needs, at once",
    "ours": "ours",
    "ours-no-hand-over": "ours, without hand-over",
    "ray": "Ray Serve's default",
    "hpa": "HPA, 240 s",
    "knative": "Knative's panic",
    "saturation": "saturation thresholds",
    "sla-means": "an SLA planner on means",
}
TTFT_ARMS = {
    "vllm": "vLLM, prefix caching",
    "compiled": "vLLM, compiled",
    "exact": "`exact`",
    "patched": "`auto`, patched",
    "limit": "only the text",
}

# What is told of a benchmark, beside its target: (benchmark, figure, what it is).
FIGURES = (
    ("ttft", "patched_speedup_1024", "vLLM's time over ours, patched: an image of 1,024 tokens"),
    ("ttft", "patched_speedup_2048", "the same, 2,048 tokens"),
    ("ttft", "limit_over_patched_2048", "an engine that computes only the text, over ours"),
    ("ttft", "exact_over_vllm_1024", "ours in mode `exact` over vLLM's, 1,024 tokens"),
    ("rates", "ttft_over_prefix", "time to first token over vLLM's where vLLM saturates; pages ordered by the service"),
    ("rates", "throughput_over_prefix", "most requests completed a second, over vLLM's"),
    ("rates", "throughput_over_cacheblend15", "the same over `cacheblend-15`"),
    ("sustained", "last_over_best", "last 50 queries over the best 50 before"),
    ("sustained", "last_over_off", "last 50 queries over 50 with reuse switched off"),
    ("sustained", "max_library_bytes_over_bound", "most bytes in the library over its bound"),
    ("sustained", "memory_end_over_middle", "memory of all processes: last sixth of the run over the third"),
    ("soak", "wrong_answers", "answers under load and damage that are not those of the request alone"),
    ("soak", "errors", "of these requests: errors"),
    ("soak", "silent_cuts", "the same: streams that ended without a word"),
    ("soak", "blocks_left", "KV blocks and leases that did not come back"),
    ("soak", "growth_mib", "MiB of all processes together: the last third of ten minutes over the second"),
    ("one-shot", "ttft_over_vllm", "images that never come again: over vLLM's"),
    ("one-shot", "ttft_over_off", "the same over ours with reuse switched off"),
    ("system-prompt", "cached_over_vllm_3072", "3,072 tokens of text that came before: ours over vLLM's"),
    ("system-prompt", "off_over_cached_3072", "nothing reused, over ours"),
    ("image-first", "ttft_over_vllm", "a new question about an image that came before: over vLLM's prefix caching"),
    ("turns", "tokens_over_vllm", "tokens computed in a chat's later turns, over vLLM's"),
    ("turns", "idle_tokens_over_vllm", "the same, tokens that idle time computes: canonical KV; answers are read"),
    ("turns", "ttft_over_vllm", "time to first token of these, over vLLM's"),
    ("agent", "ttft_over_vllm_3", "an agent's step, a window of 3 screenshots slides: over vLLM's prefix caching"),
    ("agent", "ttft_over_vllm_6", "the same, 6 screenshots"),
    ("agent", "ttft_over_vllm_12", "the same, 12 screenshots"),
    ("agent", "longest_over_shortest", "ours with 12 screenshots over ours with 3"),
    ("agent", "recall_over_exact", "a look back at a screenshot that left, over mode `exact`"),
    ("agent", "recall_same_answer", "of these look-backs: the first words are those of mode `exact`"),
    ("video-window", "ttft_over_vllm", "a minute of clips, one new a step: over vLLM's prefix caching"),
    ("video-window", "encoded_over_new", "the same: vision tokens encoded, over the new clip's"),
    ("video-window", "first_over_vllm", "a clip for the first time: over vLLM's"),
    ("routing", "hit_rate_over_default", "found in memory, over Ray Serve's default router; four workers"),
    ("routing", "imbalance", "the busiest worker's work over the mean, the worst turn"),
    ("routing", "ttft_over_default_1", "time to first token over the default's, one worker"),
    ("break-even", "reuses", "reuses until KV and patch have paid, against reuse off; the worst case"),
    ("break-even", "reuses_exact", "the same against mode `exact`"),
    ("placement", "hit_rate_over_arrival", "pages that find a patch: ordered by the service over as sent"),
    ("placement", "hit_rate_over_optimum", "the same over the best order with hindsight"),
    ("placement", "hit_rate_pairs_over_arrival_pairs", "with sums of pairs: ordered by the service over as sent"),
    ("placement", "plan_ms_8", "ms to order 8 pages"),
    ("placement", "plan_ms_12", "ms to order 12 pages"),
    ("search", "ms_10k", "ms of processor for a hybrid search under a filter, 10,000 pages"),
    ("search", "ms_100k", "the same, 100,000 pages"),
    ("search", "recall", "of the ten nearest pages found, under any filter"),
    ("search", "http_ms", "ms of one search over HTTP, 10,000 pages"),
    ("search", "pdf_100_pages_s", "s from the upload of a PDF of 100 pages until its text is found"),
    ("search", "cranfield_ndcg", "nDCG@10 of Cranfield's judged queries"),
    ("search", "visual_ndcg", "the same, every abstract a page of a PDF"),
    ("mrag", "found", "1,000 drawn pages: the right one among four found by the bundled model's tower"),
    ("mrag", "right_over_oracle", "right answers over these four, over those with the right page given"),
    ("mrag", "ttft_over_outside", "four pages found before the answer: over a search and vLLM's prefix caching"),
    ("mrag", "pause_over_prefill", "four more pages in mid-answer: over sending vLLM the conversation again"),
    ("mrag", "pause_over_known", "the same, where vLLM has all before the last four in its prefix cache"),
    ("mrag", "pause_vision_tokens", "vision tokens encoded in that pause"),
    ("compile-trace", "patched_afterwards_sets", "pages served by 1 GiB of patches of whole sets"),
    ("compile-trace", "patched_afterwards_pairs", "the same by patches of pairs"),
    ("compile-trace", "share_of_optimum_sets", "saved, over a bound of the offline optimum; sets"),
    ("compile-trace", "share_of_optimum_pairs", "the same; pairs"),
    ("handoff", "ms_per_mib", "ms per MiB of KV over NIXL"),
    ("handoff", "fixed_ms", "ms whatever the size"),
    ("handoff", "answer_pulled_ms", "ms to read an answer of 128 tokens back from the decode worker, by these two"),
    ("handoff", "answer_computed_ms", "ms to compute it, in idle time"),
    ("elastic", "before_over_full", "right answers at a fifth of the KV over at all of it; the worse of GQA and MHA"),
    ("elastic", "before_over_best", "the same over the best of six other ways to choose it"),
    ("elastic", "after_over_full", "pages compacted before the question is known: over at all KV"),
    ("elastic", "after_over_best", "the same over the best other way"),
    ("elastic", "ppl_over_h2o", "perplexity of text at a fifth of its KV over H2O's; SmolLM2"),
    ("elastic", "ppl_over_local", "the same over local's with sinks"),
    ("elastic", "ppl_over_full", "the same over all KV's"),
    ("elastic", "ppl_over_paper", "the same over the paper's merging"),
    ("elastic", "throughput_8k", "decode steps a second at a fifth of 8,192 tokens' KV over at all of it; batch 8"),
    ("elastic", "concurrency", "answers at once in the same pool, the same way"),
    ("lazy", "bytes_with_vla", "KV bytes with lazy layers over without, at most 0.01 of answers lost; GQA or MHA"),
    ("lazy", "lost", "the same: answers that come out otherwise, on prompts that had no part in the choice"),
    ("overhead", "median_ms", "ms of a text request that are not engine time"),
    ("patch-apply", "gib_per_second", "GiB a second: load, relocate, patch, write 1,024 tokens"),
    ("patch-apply", "fraction_of_copy", "the same over a plain copy"),
    ("patch-apply", "patch_share_of_kv", "bytes of a patch over those of the KV"),
    ("patch-form", "speedup_krylov", "SVD's time over that of the block Krylov method"),
    ("patch-form", "loss_krylov", "share of the energy that it loses"),
    ("relocation", "max_ulp_bf16", "largest error of relocation in bf16, in units of the last place"),
    ("store", "disk_read_fraction", "cold reads over the raw disk"),
    ("store", "disk_write_fraction", "durable writes over the raw disk"),
    ("store", "s3_read_fraction", "reads from S3 over a raw s3fs transfer"),
    ("store", "s3_write_fraction", "writes to S3 over a raw s3fs transfer"),
    ("parallel-load", "over_max", "loading beside computing, over the longer of the two"),
    ("parallel-load", "over_sum", "the same over their sum"),
    ("weighing", "weighing_over_kv_256", "weighing sums by attention over by KV, pages of 256 tokens"),
    ("weighing", "attention_over_known_256", "the whole link, weighed by attention, over one whose weights are known"),
    ("weighing", "kv_over_known_256", "the same, weighed by KV"),
    ("autoscale", "replica_seconds_over_oracle", "autoscaling, simulated: replica-seconds over an instant oracle's"),
    ("autoscale", "over_best", "the same over the best other policy's that keeps 0.99 of static peak's good answers"),
    ("autoscale", "attainment_over_static", "good answers over static peak's, the worst trace"),
    ("autoscale", "goodput_over_best", "good answers a replica-second over the best other's, 0.7 of images return"),
    ("autoscale", "reuse_kept", "found again in the five minutes after a shrink, over before"),
    ("autoscale", "reuse_without_hand_over", "the same without hand-over"),
    ("autoscale", "flips", "changes of direction in an hour of a load of 2 ± 0.1 replicas"),
    ("autoscale", "day_seconds", "processor seconds to simulate a day of requests, 3% of ServeGen's rate"),
    ("autoscale", "decision_ms", "ms of one plan for 200 replicas"),
    ("cluster", "recovery_s", "a worker's node of three loses its power: s to the first right answer"),
    ("cluster", "slowest_s", "to the last of the questions under way, linked anew elsewhere"),
    ("cluster", "back_s", "s until workers serve on the node that came back"),
    ("cluster", "failed", "answers that failed, of three power cuts"),
    ("scale-down", "failed", "answers that failed in scale-downs of prefill and decode under load (C: two of them)"),
    ("scale-down", "reuse_kept", "tokens of pages found again after these, over before"),
    ("scale-down", "p50_error", "time to first token as simulated, over measured, less 1: median"),
    ("scale-down", "p99_error", "the same, 99th percentile"),
    ("precompute", "chunks_per_s_1", "chunks of 256 tokens a second, one worker"),
    ("precompute", "gain", "two workers over one"),
    ("link-time", "exact_over_patched 1 x 1024", "in one prefill worker: computed over linked, 1,024 tokens"),
    ("link-time", "exact_over_patched 4 x 1024", "the same, four pages"),
    ("patch-rank", "eta_own_32", "η of a patch of rank 32, random weights"),
    ("patch-rank", "eta_stale_32", "the same behind other predecessors than it was formed behind"),
)  # fmt: skip


def benchmarks() -> str:
    """All benchmarks: what each answers, and its records."""
    rows = []
    for name, benchmark in BENCHMARKS.items():
        links = [f"[{machine}](results/{name}-{MACHINES[machine]}.json)" for machine, _ in records(name)]
        elsewhere = "[below](#what-reuse-answers)" if name == "fidelity" else "none yet"
        rows.append((f"`{name}`", benchmark.description, ", ".join(links) or elsewhere))
    return markdown(("name", "what it answers", "records"), rows)


def figures() -> str:
    """Figures of all benchmarks but fidelity beside their targets; misses are in bold."""
    rows, last = [], ""
    for benchmark, figure, words in FIGURES:
        target = BENCHMARKS[benchmark].targets.get(figure)
        row = ["" if benchmark == last else f"`{benchmark}`", words]
        for machine in MACHINES:
            found = record(benchmark, machine)
            value = found.figures.get(figure) if found else None
            row.append("" if value is None else judged(value, target))
        rows.append([*row, aim(target)])
        last = benchmark
    return markdown(("benchmark", "figure", *MACHINES, "aimed at"), rows)


def ttft() -> str:
    """Time to first token with one image behind text that is new."""
    rows = []
    for machine, found in records("ttft"):
        for tokens in found.workload["image_tokens"]:
            medians = [found.medians(arm).get(str(tokens)) for arm in TTFT_ARMS]
            rows.append((machine, f"{tokens:,}", *("" if ms is None else f"{ms:.0f}" for ms in medians)))
    return markdown(("", "image tokens", *TTFT_ARMS.values()), rows)


def offered(found: Record) -> dict[str, float]:
    """Mean requests a second at each nominal rate.

    Arrivals are drawn, and the draws are few.
    """
    workload, by_rate = found.workload, {}
    for rate, count in zip(workload["rates"], workload["requests_of_a_turn"], strict=True):
        turns = [poisson(rate, count, seed) for seed in range(workload["turns"])]
        spans = [(due[-1].at - due[0].at) / (count - 1) for due in turns]
        by_rate[f"{rate:g}"] = len(spans) / sum(spans)
    return by_rate


def rates() -> str:
    """Retrieval under load: time to first token and completed requests at every rate, by arm."""
    parts = []
    for machine, found in records("rates"):
        came, completed, late = offered(found), found.table("completed a second"), found.table("TTFT p90, ms")
        rows = []
        for arm, words in RAG_ARMS.items():
            cells = []
            for rate, offer in came.items():
                done = completed[arm].get(rate)
                saturated = "*" if done is not None and done < SATURATED * offer else ""
                median = found.medians(arm).get(rate)
                cells.append("" if done is None else f"{median:.0f} ({late[arm][rate]:.0f}), {done:.2f}{saturated}")
            rows.append((words, *cells))
        parts.append(markdown((f"{machine}: requests a second", *came), rows))
    return "\n\n".join(parts)


def sustained() -> str:
    """Sets that never came together before: time to first token by window of queries."""
    rows = []
    for machine, found in records("sustained"):
        windows = found.table("median TTFT of a window, ms")["auto"]
        off = found.medians("off")
        rows.append((machine, *(f"{ms:.0f}" for ms in windows.values()), f"{off['before']:.0f}, {off['after']:.0f}"))
    width = measured("sustained", FIRST).workload["window"]
    header = (f"{int(first) + 1} to {int(first) + width}" for first in windows)
    return markdown(("queries", *header, "50 with reuse off, before and after"), rows)


def one_shot() -> str:
    """Images that never come again: median time to first token and its 90th percentile."""
    rows = []
    for machine, found in records("one-shot"):
        (rate,) = found.medians("auto")
        late = found.table("TTFT p90, ms")
        cells = (f"{found.median(arm, rate):.0f} ({late[arm][rate]:.0f})" for arm in ONE_SHOT_ARMS)
        rows.append((machine, rate, *cells))
    return markdown(("", "requests a second", *ONE_SHOT_ARMS.values()), rows)


def stages() -> str:
    """Stages of a request's time on machine B, as responses report them."""
    retrieval, alone = measured("rates", FIRST), measured("one-shot", FIRST)
    rate, (single,) = retrieval.workload["vllm_saturates_at"], alone.medians("auto")
    names = ("media", "rendered", "plan", "vision", "queue", "select", "place", "forward", "link", "decode")
    rows = []
    for words, found, arm, at in (
        (f"`rates`, {rate} a second", retrieval, "auto-placed", rate),
        (f"`one-shot`, {single} a second", alone, "auto", single),
    ):
        tables = found.document["tables"]
        cells = (tables.get(f"stage {name}, median ms", {}).get(arm, {}).get(at) for name in names)
        first = f"{found.median(arm, at):.0f}"
        rows.append((words, *("" if ms is None else f"{ms:.0f}" for ms in cells), first))
    return markdown(("median ms", *names, "first token at the client"), rows)


def system_prompt() -> str:
    """Time to first token of text behind a system prompt that came before."""
    rows = []
    for machine, found in records("system-prompt"):
        for tokens in found.workload["system_tokens"]:
            cells = (f"{found.median(arm, str(tokens)):.0f}" for arm in ("vllm", "cached", "off"))
            rows.append((machine, f"{tokens:,}", *cells))
    return markdown(("", "tokens of text", "vLLM, prefix caching", "ours", "ours, nothing reused"), rows)


def break_even() -> str:
    """CPU seconds of a prefill worker: costs of reuse, and the number of reuses that pay for it."""
    rows = []
    for machine, found in records("break-even"):
        paid = found.table("reuses until it has paid")
        for pages in found.workload["pages x tokens"]:
            cells = (f"{found.median(arm, pages) / 1e3:.2f}" for arm in ("off", "exact", "first", "again"))
            rows.append((machine, pages, *cells, *(f"{paid[arm][pages]:.1f}" for arm in ("off", "exact"))))
    header = ("", "pages x tokens", "`off`, s", "`exact`, s", "first time, s", "again, s")
    return markdown((*header, "pays after, against `off`", "against `exact`"), rows)


def placement() -> str:
    """Simulated retrieval: share of pages that find a patch, by order."""
    found = measured("placement", "A")
    by_pages = found.table("hit rate by pages retrieved")
    known = found.table("chunks behind two or more whose very order came before")
    words = {
        "placed, pairs": "ordered by the service, pairs summed (the default)",
        "arrival, pairs": "as sent, pairs summed",
        "placed": "ordered by the service, no sums",
        "arrival": "as sent, no sums",
        "optimum": "best order with hindsight, no sums",
    }
    rows = [
        (text, *(f"{value:.2f}" for value in by_pages[arm].values()), _share(known.get(arm, {}), "5 pages"))
        for arm, text in words.items()
    ]
    header = (f"of {pages}" for pages in by_pages["placed"])
    return markdown(("pages that find a patch", *header, "order seen before, of 5 pages"), rows)


def _share(cells: Mapping[str, float], column: str) -> str:
    return f"{cells[column]:.2f}" if column in cells else ""


def shared_processors() -> str:
    """Costs around a forward on a processor that roles share."""
    cores, idle, kernels = (measured(name, FIRST) for name in ("shared-cores", "idle", "cpu-kernels"))
    told = [
        (cores, "link_alone_over_spinning", "a link's forward alone, over OpenMP's default"),
        (cores, "link_alone_over_waiting", "the same over threads that always sleep"),
        (cores, "link_beside_the_other_over_spinning", "a link's forward beside a decode step, over OpenMP's default"),
        (cores, "decode_beside_the_other_over_spinning", "a decode step beside a link, over OpenMP's default"),
        (idle, "forward_over_alone", "a forward beside a service that is asked for nothing, over alone"),
        (idle, "cores", "processor cores that such a service takes"),
        (idle, "wakes_per_s", "times a second that it wakes up"),
    ]
    told += (
        (kernels, f"time_{tokens}", f"a forward with fused kernels over one without, tokens: {tokens:,}")
        for tokens in kernels.workload["computed"]
    )
    rows = ((words, number(found.figures[name]), f"`{found.document['name']}`") for found, name, words in told)
    return markdown(("on machine B", "", "benchmark"), rows)


def headline() -> str:
    """Three figures for the first page: what is gained, how right it is, and what it costs."""
    retrieval, alone = measured("rates", FIRST), measured("one-shot", FIRST)
    low = f"{retrieval.workload['rates'][0]:g}"
    (rate,) = alone.medians("auto")
    vllm, free, sent = (f"{retrieval.median(arm, low):.0f} ms" for arm in ("prefix", "auto-placed", "auto"))
    arms = ("exact", "patch_8", "composed", "blind")
    exact, own, sums, blind = (f"{cell('gqa', 'accuracy', arm, 'multi'):.2f}" for arm in arms)
    new, vllm_new = (f"{alone.median(arm, rate):.0f} ms" for arm in ("auto", "prefix"))
    return "\n".join(
        (
            f"- **Sooner**: questions over 4 of 12 retrieved pages, {float(low):.2f} a second, nothing saturated: "
            f"first token after {free}; {sent} if the order is kept; vLLM with prefix caching {vllm}.",
            f"- **As right**: questions that need several pages, asked of a small model trained for them: {exact} "
            f"computed, {own} patched, {sums} in sets that never came before, {blind} without patches.",
            f"- **The price**: an image that never comes again: {new}, vLLM {vllm_new}.",
        )
    )


def first_page() -> str:
    """First page's four workloads: median TTFT in milliseconds, with what beats us beside it."""
    image, retrieval, alone, sets = (measured(name, FIRST) for name in ("ttft", "rates", "one-shot", "sustained"))
    low, full = f"{retrieval.workload['rates'][0]:g}", retrieval.workload["vllm_saturates_at"]
    (rate,) = alone.medians("auto")

    def at(offer: str) -> list[str]:
        return [f"{retrieval.median(arm, offer):,.0f}" for arm in ("prefix", "auto-placed", "auto", "mpic-32")]

    reused, new = f"{image.median('patched', '1024'):.0f}", f"{alone.median('auto', rate):.0f}"
    rows = [
        ("one image of 1,024 tokens behind new text", f"{image.median('vllm', '1024'):.0f}", reused, reused, ""),
        (f"4 of 12 pages, {float(low):.2f} requests a second", *at(low)),
        (f"the same, {float(full):.1f} a second, where vLLM saturates", *at(full)),
        ("an image that never comes again", f"{alone.median('prefix', rate):.0f}", new, new, ""),
    ]
    header = ("median ms to the first token", "vLLM, prefix caching", "`auto`, order free", "as sent", "`mpic-32`")
    last = [*sets.table("median TTFT of a window, ms")["auto"].values()][-1]
    return markdown(header, rows) + (
        f"\n\nSets of known pages that never came together: {last:.0f} ms, "
        f"{sets.figures['last_over_off']:.2f} of what it is with reuse switched off."
    )


def plans() -> str:
    """Good answers and replica-hours of autoscaling policies on each trace."""
    found = measured("autoscale", "C")
    good, hours = found.table("good answers"), found.table("replica-hours")
    traces = list(good["static"])
    rows = [
        (PLANS.get(policy, f"`{policy}`"), *(f"{good[policy][one]:.3f}, {hours[policy][one]:.1f}" for one in traces))
        for policy in good
    ]
    return markdown(("share of good answers, replica-hours", *traces), rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "headline": headline,
    "first-page": first_page,
    "benchmarks": benchmarks,
    "figures": figures,
    "ttft": ttft,
    "rates": rates,
    "sustained": sustained,
    "one-shot": one_shot,
    "stages": stages,
    "system-prompt": system_prompt,
    "break-even": break_even,
    "placement": placement,
    "plans": plans,
    "shared-processors": shared_processors,
}
