"""`outrider sim --demo`: one simulated run step by step, then a campaign, then a bug put back."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outrider.scheduler.plan import ScheduledRequest, StepPlan, Verdict
from outrider.tools.sim.campaign import run_campaign
from outrider.tools.sim.mutation_table import MUTATIONS
from outrider.tools.sim.mutations import try_mutation
from outrider.tools.sim.scenario import GroupDraw, RequestDraw, Scenario
from outrider.tools.sim.world import World
from outrider.tools.wording import counted

CAMPAIGN_SCENARIOS = 200


def demo_scenario(seed: int) -> Scenario:
    """A block drafter on a hybrid target; the second and third request share the first one's prompt."""
    stem = tuple(1 + (seed + 7 * i) % 11 for i in range(21))
    return Scenario(
        seed=seed,
        archetype="block_from_taps",
        target=(GroupDraw(page_tokens=4, slot_bytes=2), GroupDraw(page_tokens=4, slot_bytes=2, window=6)),
        draft=(GroupDraw(page_tokens=4, slot_bytes=2),),
        max_chunk_tokens=12,
        acceptance=0.8,
        vocabulary=60,
        requests=(
            RequestDraw(id="alice", prompt=stem, max_tokens=10, k=4),
            RequestDraw(id="bob", prompt=stem, max_tokens=8, k=4, at=12),
            RequestDraw(id="carol", prompt=(*stem[:14], 3, 3), max_tokens=6, k=4, at=14),
        ),
    )


def show_demo(console: Console, seed: int) -> bool:
    """Show all three parts. Returns whether the first two found no failure and the bug was caught."""
    return all([_show_run(console, seed), _show_campaign(console, seed), _show_bug(console, seed)])


def _show_run(console: Console, seed: int) -> bool:
    console.rule("one run")
    scenario = demo_scenario(seed)
    world = World(scenario)
    console.print(
        "A block drafter beside a target with a full and a sliding group (window 6), pages of 4 tokens.\n"
        "bob repeats alice's prompt; carol leaves it after 14 tokens. "
        "[green]+ accepted draft[/green], [cyan]= the target's own token[/cyan], [dim]x rejected draft[/dim]\n"
    )
    shown: dict[str, int] = {}

    def show(plan: StepPlan, verdict: Verdict) -> None:
        worker = world.workers["decode"]
        for row, tokens in zip(plan.scheduled, verdict.tokens, strict=True):
            kv = worker.kv.sequences.get(row.sequence_id)
            if kv is not None and row.sequence_id not in shown:
                shown[row.sequence_id] = kv.hit
                where = "in a copied page" if kv.hit % scenario.target[0].page_tokens else "at a page boundary"
                note = f"hits {kv.hit} of {len(kv.tokens)} tokens, {where}" if kv.hit else "finds nothing cached"
                console.print(f"          [bold]{row.sequence_id}[/bold] {note}")
            console.print(_line(plan.step, row, tokens), highlight=False)

    world.watch(show)
    result = world.run()
    outcome = "all outputs equal the oracle's" if result.failure is None else escape(result.failure.message)
    console.print(f"\n{counted(result.steps, 'step')}, {counted(result.tokens, 'token')}: {outcome}\n")
    return result.failure is None


def _line(step: int, row: ScheduledRequest, tokens: tuple[int, ...]) -> str:
    span = f"[{row.start}, {row.end})"
    parts = [(f"+{token}", "green") for token in tokens[:-1]] + [(f"={token}", "cyan") for token in tokens[-1:]]
    parts += [("x", "dim")] * (row.drafts - len(tokens) + 1 if row.samples else 0)
    plain = " ".join(text for text, _style in parts) or "prompt rows"
    marked = " ".join(f"[{style}]{text}[/{style}]" for text, style in parts) or "prompt rows"
    drafts = f"drafts {row.propose}" if row.propose else ""
    return f"step {step:3}  {row.sequence_id:6} {escape(f'{span:10}')} {marked}{' ' * (26 - len(plain))} {drafts}"


def _show_campaign(console: Console, seed: int) -> bool:
    console.rule(f"{CAMPAIGN_SCENARIOS} random worlds")
    console.print(
        "Every archetype of drafter, page sizes, windows, chunk sizes and roles, under faults; a few seconds."
    )
    with console.status("running"):
        tally = run_campaign(seed, CAMPAIGN_SCENARIOS)
    counts = tally.as_json()
    table = Table(show_header=False)
    for name in ("steps", "tokens", "violations", "wrong_outputs", "leaked_pages", "hit_mismatches", "seconds"):
        table.add_row(name.replace("_", " "), f"{counts[name]:,}")
    table.add_row("events", ", ".join(f"{n} {c}" for n, c in counts["faults"].items() if c).replace("_", " "))
    console.print(table)
    return not tally.failures


def _show_bug(console: Console, seed: int) -> bool:
    console.rule("and with a bug put back")
    mutation = MUTATIONS[0]
    console.print(f"{mutation.story}:")
    result = try_mutation(mutation, seed)
    console.print(f"[red]{escape(result.message)}[/red]")
    console.print("\nMore: [bold]outrider sim --mutations[/bold], [bold]outrider sim --seed 7 --scenarios 2000[/bold]")
    return result.caught
