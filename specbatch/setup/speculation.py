"""Decides what is drafted: fills in and checks the `speculation` section."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specbatch.config import MethodName, ScheduleSection, SpeculationSection
from specbatch.draft import METHODS, MethodEntry
from specbatch.draft.none import MAX_ROOM
from specbatch.draft.schedule import ByBatch, Schedule, shapes_of
from specbatch.draft.shape import DraftShape, num_lookahead
from specbatch.engine.verify_budget import VerifyBudget
from specbatch.errors import ConfigError
from specbatch.kernels.corpus import MAX_SIZE
from specbatch.models.blocks.config import BlockConfig
from specbatch.models.catalog import builtin_draft, builtin_head, random_name
from specbatch.models.formats.eagle_files import EagleCheckpoint, next_layers

DEFAULT_TREE_TOKENS = 8
CORPUS_METHODS = ("suffix", "hybrid")
# The most nodes of these methods where shapes are fixed, by batch size. A round of 8,192 tokens needs the memory that a
# chunk of prompts needs. Rounds choose fewer nodes.
_SUFFIX_NODES = {256: 32, 512: 16, 1024: 8, 2048: 4}
MAX_TOPK, MAX_TREE_TOKENS = 16, 128  # limits of the device engine


@dataclass(frozen=True, slots=True)
class Speculation:
    """The draft method and the draft shapes of a run."""

    section: SpeculationSection  # with everything filled in
    schedule: Schedule
    block_size: int = 0  # slots that a block drafter writes in a round; 0: there is none

    @property
    def method(self) -> str:
        return self.section.method

    @property
    def has_network(self) -> bool:
        """Return whether a draft network drafts, which `section.draft` names."""
        return METHODS[self.method].net is not None

    @property
    def shapes(self) -> list[DraftShape]:
        """Return the shapes that draft something."""
        return [shape for shape in self.schedule.items if shape is not None]

    @property
    def num_lookahead(self) -> int:
        """Slots past the committed ones that a round of the largest shape may write, in either cache."""
        if self.method == "none":
            return MAX_ROOM
        net = METHODS[self.method].net
        # The branches of a block drafter's trees have no slots in its cache.
        draft_kv_offset = None if net is None or self.block_size else net.draft_kv_offset
        return max(self.block_size, *(num_lookahead(shape, draft_kv_offset) for shape in self.schedule.items))


def decide_method(
    section: SpeculationSection, target: str, notes: list[str], *, has_mtp: bool = False, takes_block: bool = False
) -> SpeculationSection:
    """`section` with method auto decided: the head that comes with specbatch for this target, the layer for multi-token
    prediction if its checkpoint has one, else `ngram`, which needs no network. A line of `notes` names it.
    `takes_block`: of the heads, take the block drafter. It is faster on CUDA, slower on a CPU, and FlashInfer has
    none."""
    if section.method != "auto":
        return section
    if section.draft is not None:
        raise ConfigError(
            "speculation.draft is set, and speculation.method is auto, which uses built-in draft heads only",
            hint="set speculation.method to draft_model, eagle, eagle3 or block",
        )
    method: MethodName = "block" if takes_block else "eagle3"
    head = builtin_head(target, method)
    if head is None and has_mtp:
        notes.append("speculation.method: mtp (the target's checkpoint has a layer for multi-token prediction)")
        return replace(section, method="mtp")
    if head is None:
        notes.append("speculation.method: ngram (no draft head for this target comes with specbatch)")
        return replace(section, method="ngram")
    notes.append(f"speculation.method: {method} with {head} (it comes with specbatch)")
    return replace(section, method=method, draft=head)


def resolve_speculation(
    section: SpeculationSection,
    target: str,
    notes: list[str],
    coupled: bool = False,
    *,
    has_mtp: bool = False,
    takes_block: bool = False,
) -> Speculation:
    """Decide the method and the draft shapes, and check them. `target`: the value of model.target. Decisions are added
    to `notes`. `coupled`: see `DraftParts`. `has_mtp`: the target's checkpoint has a layer for multi-token prediction.
    `takes_block`: see `decide_method`."""
    section = decide_method(section, target, notes, has_mtp=has_mtp, takes_block=takes_block)
    if section.corpus is not None and section.method not in CORPUS_METHODS:
        raise ConfigError(
            f"speculation.corpus is searched by speculation.method suffix and hybrid only, and the method is "
            f"{section.method}",
            hint="leave speculation.corpus out, or set speculation.method to suffix",
        )
    if section.method in CORPUS_METHODS and section.ngram.min_match > MAX_SIZE:
        raise ConfigError(
            f"speculation.ngram.min_match is {section.ngram.min_match}, and speculation.method {section.method} finds "
            f"runs of at most {MAX_SIZE} tokens in the row's own text",
            hint=f"set speculation.ngram.min_match to at most {MAX_SIZE}",
        )
    if section.method == "none":
        section = replace(
            section, num_steps=None, num_draft_tokens=None, topk=1, draft=None, schedule=None, aux_layers=None
        )
        return Speculation(section, ByBatch.always(None))
    if section.method == "hybrid" and section.draft is None:
        section = replace(section, draft=builtin_head(target, "eagle3"))
    if section.aux_layers is not None and section.method not in ("eagle3", "peagle", "hybrid"):
        raise ConfigError(
            f"speculation.aux_layers says what an EAGLE-3 head reads, and speculation.method is {section.method}",
            hint="leave speculation.aux_layers out, or set speculation.method to eagle3",
        )
    if section.method == "hybrid" and not coupled:
        notes.append(
            "speculation.method: hybrid: sampled requests are drawn together with the head's drafts, so their texts "
            "depend on the other requests; greedy requests' do not"
        )
    entry = METHODS[section.method]
    if entry.net is None:
        section = replace(section, draft=None)
    elif section.draft is None and not entry.in_target:
        builtin = builtin_head(target, section.method)
        names = f"such as {builtin}" if builtin else "a directory, a hub id, a .gguf file or builtin:NAME"
        raise ConfigError(
            f"speculation.method {section.method} needs speculation.draft",
            hint=f"name one ({names}), or use ngram, which needs none",
        )
    if section.schedule is not None:
        schedule = _resolve_schedule(section, section.schedule)
        filled = tuple(map(_schedule_section, schedule.bounds, schedule.items))
        if not coupled and section.method != "hybrid":  # which has its own note
            _note_chains(schedule, entry, notes)
        return Speculation(replace(section, schedule=filled), schedule)
    shape = _resolve_shape(section, section)
    section = replace(section, num_steps=shape.num_steps, num_draft_tokens=shape.num_draft_tokens)
    return Speculation(section, ByBatch.always(shape))


def with_block(
    speculation: Speculation,
    given: SpeculationSection,
    block: BlockConfig,
    notes: list[str],
    coupled: bool = False,
    *,
    on_cuda: bool = False,
) -> Speculation:
    """Return the speculation for a block drafter, whose number of drafts is known when its files are open. `given`: the
    section of the configuration. `notes`, `coupled`: see `resolve_speculation`."""
    section, most = speculation.section, block.max_drafts
    builtin = builtin_draft(section.draft)
    default_steps = (None if builtin is None else builtin.num_steps) or most
    if given.schedule is not None:
        schedule = _resolve_schedule(section, given.schedule, default_steps)
        section = replace(section, schedule=tuple(map(_schedule_section, schedule.bounds, schedule.items)))
    elif on_cuda and builtin is not None and builtin.cuda_schedule and _takes_schedule(given):
        filled = tuple(ScheduleSection(*entry) for entry in builtin.cuda_schedule)
        section = replace(section, num_steps=None, num_draft_tokens=None, schedule=filled)
        schedule = _resolve_schedule(section, filled)
        if not coupled:
            _note_chains(schedule, METHODS[section.method], notes)
    else:
        shape = _resolve_shape(section, given, default_steps)
        section = replace(section, num_steps=shape.num_steps, num_draft_tokens=shape.num_draft_tokens)
        schedule = ByBatch.always(shape)
    for shape in shapes_of(schedule):
        if shape.num_steps > most:
            option, largest = "speculation.num_steps", most
            if given.schedule is None and given.num_steps is None:
                option, largest = "speculation.num_draft_tokens", most + 1  # with the root
            value = shape.num_steps + largest - most
            raise ConfigError(
                f"{option} is {value}, and a block of this drafter has {most} drafts",
                hint=f"set {option} to at most {largest}, or leave it out",
            )
    return Speculation(section, schedule, block.block_size)


def _takes_schedule(given: SpeculationSection) -> bool:
    """Return whether a default may be a schedule with trees: no shape is given, nor an option that refuses them."""
    has_shape = (given.num_steps, given.topk, given.num_draft_tokens) != (None, 1, None)
    return not has_shape and given.verify_budget in (None, "none") and given.simulate_acceptance is None


def with_sizes_of_batches(speculation: Speculation, given: SpeculationSection) -> Speculation:
    """Return `speculation` for a device with fixed shapes, where rounds of `suffix` and `hybrid` cost all of their
    nodes. `given`: the section as the user gave it; a shape that it sets is kept."""
    shapes = (given.num_steps, given.num_draft_tokens, given.schedule, given.simulate_acceptance)
    if speculation.method not in CORPUS_METHODS or shapes != (None,) * len(shapes):
        return speculation
    items = tuple(DraftShape(nodes - 1, 1, nodes) for nodes in _SUFFIX_NODES.values())
    schedule: Schedule = ByBatch(tuple(_SUFFIX_NODES), items)
    filled = tuple(map(_schedule_section, schedule.bounds, schedule.items))
    section = replace(speculation.section, num_steps=None, num_draft_tokens=None, schedule=filled)
    return Speculation(section, schedule)


def _resolve_shape(
    section: SpeculationSection, given: SpeculationSection | ScheduleSection, default_steps: int | None = None
) -> DraftShape:
    """Decide the shape of `section`, or of an entry of its schedule. `default_steps`: the steps where none are given;
    None: those of the method."""
    entry, steps, topk, tokens = METHODS[section.method], given.num_steps, given.topk, given.num_draft_tokens
    if entry.chains_only and topk != 1:
        raise ConfigError(f"speculation.topk must be 1 for {section.method}, which drafts chains, got {topk}")
    if steps is None:
        steps = tokens - 1 if tokens is not None and topk == 1 else default_steps or entry.default_num_steps
    if tokens is None and topk == 1:
        tokens = steps + 1
    elif tokens is None:
        # A block is drafted whole, so a tree has room for its longest path.
        wanted = max(DEFAULT_TREE_TOKENS, steps + 1) if section.method == "block" else DEFAULT_TREE_TOKENS
        tokens = min(wanted, DraftShape(steps, topk, 2).num_candidates + 1)
    shape = DraftShape(steps, topk, tokens)
    shape.check()
    return shape


def _resolve_schedule(
    section: SpeculationSection, entries: tuple[ScheduleSection, ...], default_steps: int | None = None
) -> Schedule:
    """Decide the shapes of a schedule. `default_steps`: see `_resolve_shape`."""
    option = "speculation.schedule"
    if (section.num_steps, section.topk, section.num_draft_tokens) != (None, 1, None):
        raise ConfigError(
            f"{option} and speculation.num_steps, topk or num_draft_tokens are both set",
            hint=f"give the shapes in {option}, or set {option} to null",
        )
    if all(entry.num_steps == 0 for entry in entries):
        raise ConfigError(f"{option} drafts for no number of rows", hint="set speculation.method to none instead")
    shapes: list[DraftShape | None] = []
    last = 0
    for i, entry in enumerate(entries):
        if entry.max_batch <= last:
            raise ConfigError(f"{option}[{i}].max_batch must be more than the entry's before it, {last}")
        last = entry.max_batch
        try:
            shapes.append(None if entry.num_steps == 0 else _resolve_shape(section, entry, default_steps))
        except ConfigError as error:
            raise ConfigError(f"{option}[{i}]: {error.message}", hint=error.hint) from error
    return ByBatch(tuple(entry.max_batch for entry in entries), tuple(shapes))


def _schedule_section(max_batch: int, shape: DraftShape | None) -> ScheduleSection:
    if shape is None:
        return ScheduleSection(max_batch, 0, 1, 1)
    return ScheduleSection(max_batch, shape.num_steps, shape.topk, shape.num_draft_tokens)


def _note_chains(schedule: Schedule, entry: MethodEntry, notes: list[str]) -> None:
    """A network's chains are drawn where a request samples; all other drafts give the text of plain decoding."""
    has_chains = any(shape is not None and shape.is_chain for shape in schedule.items)
    if entry.net is not None and has_chains and len(set(schedule.items)) > 1:
        notes.append(
            "speculation.schedule: sampled requests are drawn together with a chain's drafts, so their texts depend on "
            "how many requests run at the same time; greedy requests' do not"
        )


def low_acceptance(speculation: SpeculationSection, draft: object) -> str | None:
    """Likely causes where a draft network's drafts are hardly ever right. None where that is no mistake: n-grams find
    little in some texts, and random weights guess."""
    if METHODS[speculation.method].net is None or speculation.simulate_acceptance is not None:
        return None
    if random_name(speculation.draft) is not None or speculation.method == "mtp":
        return None
    causes = ["the rows are sampled at a high temperature"]
    if speculation.method == "draft_model":
        causes.insert(0, "the draft model is of another family or fine-tune than the target, or far too small")
    else:
        causes.insert(0, "the head was trained for another target, or for other texts than these")
    if isinstance(draft, EagleCheckpoint) and speculation.method in ("eagle3", "peagle", "hybrid"):
        layers = draft.config.aux_layers
        if draft.may_be_outputs:
            instead = f"try --set 'speculation.aux_layers={next_layers(layers)}'"
            causes.insert(0, f"its config.json names layers {list(layers)} by their outputs, as SGLang does: {instead}")
        else:
            causes.append(f"it was trained on other layers than {list(layers)}: set speculation.aux_layers")
        normed = "without" if draft.config.norm_before_residual else "with"
        causes.append(f"it was trained {normed} norm_before_residual, unlike what its config.json says")
    return "; or ".join(causes)


def resolve_budget(
    speculation: Speculation, attention: str, notes: list[str], *, deterministic: bool, can_measure: bool
) -> VerifyBudget | None:
    """Decide the nodes that rounds verify; None: all. It refuses a budget where rounds cannot have one. `can_measure`:
    rounds are graphs, whose times say which nodes are worth verifying, and all ranks have the same requests."""
    option, nodes = "speculation.verify_budget", speculation.section.verify_budget
    if nodes == "none":
        return None
    if nodes is None:
        can_share = can_measure and not deterministic and attention != "flashinfer"
        if speculation.method not in CORPUS_METHODS or not can_share or speculation.section.simulate_acceptance:
            return None
        notes.append(f"{option}: auto (the default with speculation.method: {speculation.method})")
        return VerifyBudget(None)
    if speculation.method == "none":
        raise ConfigError(f"{option} is shared by drafts, and speculation.method is none", hint=f"set {option}: null")
    if tree := next((shape for shape in speculation.shapes if not shape.is_chain), None):
        raise ConfigError(
            f"{option} is shared by chains, and the draft shape {tree} is a tree",
            hint=f"set speculation.topk: 1, or {option}: null",
        )
    if attention == "flashinfer":
        raise ConfigError(
            f"{option} gives requests different numbers of nodes, and engine.attention: flashinfer is planned for "
            "equal ones",
            hint=f"set engine.attention: triton, or {option}: null",
        )
    if deterministic:
        raise ConfigError(
            f"with {option} the rounds of a request depend on the others, and engine.deterministic is on",
            hint=f"set {option}: null",
        )
    if nodes == "auto" and not can_measure:
        notes.append(
            f"{option}: auto, all nodes (it needs rounds that are CUDA graphs, and ranks with the same requests)"
        )
        return None
    if METHODS[speculation.method].net is not None and speculation.method != "hybrid":  # which has its own note
        notes.append(
            f"{option}: sampled requests are drawn together with a chain's drafts, so their texts depend on the "
            "requests that run at the same time; greedy requests' do not"
        )
    return VerifyBudget(None if nodes == "auto" else nodes)


def check_simulation(speculation: Speculation, on_cuda: bool) -> None:
    simulated = speculation.section.simulate_acceptance
    if simulated is None:
        return
    option = "speculation.simulate_acceptance"
    if speculation.method == "none":
        raise ConfigError(
            f"{option} needs drafts to accept, and speculation.method is none",
            hint=f"set speculation.method, or {option} to null",
        )
    if speculation.section.schedule is not None:
        raise ConfigError(f"{option} is one figure for one shape, and speculation.schedule has several")
    [shape] = speculation.shapes
    if simulated > shape.num_steps + 1:
        raise ConfigError(
            f"{option} is {simulated:g}, but a round of {shape.num_steps} steps commits at most {shape.num_steps + 1} "
            "tokens",
            hint="raise speculation.num_steps",
        )
    if not on_cuda:
        raise ConfigError(
            f"{option} needs engine.device cuda",
            hint="elsewhere, acceptance is what the drafts are worth; set it to null",
        )


def check_device_shape(shape: DraftShape) -> None:
    """The kernels for a GPU are built for trees of some size."""
    if shape.topk > MAX_TOPK or (shape.topk > 1 and shape.num_draft_tokens > MAX_TREE_TOKENS):
        raise ConfigError(
            f"on a GPU draft trees have at most topk {MAX_TOPK} and {MAX_TREE_TOKENS} num_draft_tokens, not {shape}",
            hint="lower speculation.topk and num_draft_tokens",
        )


def check_mask_size(shape: DraftShape, max_batch_size: int, max_length: int) -> None:
    """FlashInfer reads a bit for each node and each slot of its row, and addresses all of them in 32 bits of bytes."""
    if shape.is_chain:
        return
    num_bytes = (max_batch_size + 1) * max(shape.num_draft_tokens, shape.topk) * max_length // 8
    if num_bytes >= 2**31:
        raise ConfigError(
            f"engine.attention: flashinfer holds tree masks of at most 2 GiB, and {max_batch_size} rows of "
            f"{max_length} tokens with trees of {shape.num_draft_tokens} take {num_bytes / 2**30:.1f}",
            hint="lower engine.max_batch_size or speculation.num_draft_tokens, or use engine.attention: triton",
        )
