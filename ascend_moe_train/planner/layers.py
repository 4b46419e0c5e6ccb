"""What one decoder block costs on one device: parameters, kept activations, matrix products, traffic. Pure.

t = tokens of a micro-batch on one dp and cp rank; D hidden, F ffn, H heads, G kv heads, Z and Y their widths in
queries and keys and in values, S sequence, E experts, K of them for a token, a bytes of an activation.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

from ascend_moe_train.model.counts import parameter_shapes
from ascend_moe_train.parallel.mesh import DENSE_AXES, EXPERT_AXES
from ascend_moe_train.planner.plan import Job, Plan
from ascend_moe_train.planner.techniques import Techniques

Verb = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ring"]
FP32_BYTES = 4
AXES = (*DENSE_AXES, *EXPERT_AXES[1:])
ROUTED_AXES = EXPERT_AXES[2:]  # over which rows go to their experts


class Slice(NamedTuple):
    """The part of a plan on which a block's costs depend."""

    tp: int
    sequence_parallel: bool
    cp: int
    context: str
    ep: int
    etp: int
    micro_sequences: int

    @classmethod
    def of(cls, plan: Plan) -> "Slice":
        """That of a plan."""
        return cls(plan.tp, plan.sequence_parallel, plan.cp, plan.context, plan.ep, plan.etp, plan.micro_sequences)


def effective(techniques: Techniques, cut: Slice) -> Techniques:
    """Without what has no effect on experts that are cut so."""
    changes: dict[str, Any] = {}
    if cut.ep == 1:
        changes = {"expert_wire": None, "expert_chunks": 1}
    node, across = techniques.hierarchical_ranks, cut.ep * cut.etp
    if node is not None and not (node % cut.etp == 0 and across % node == 0 and cut.etp < node < across):
        changes |= {"hierarchical_ranks": None, "dedup_tokens": None}
    return replace(techniques, **changes) if changes else techniques


class Product(NamedTuple):
    """Matrix products of m x k by k x n, so many `times`, in `part` of the model."""

    part: str
    m: float
    n: float
    k: float
    times: int = 1

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.m * self.n * self.k * self.times

    @property
    def passes(self) -> tuple["Product", "Product", "Product"]:
        """The product itself, and those for the gradients of its two factors, inputs first."""
        part, m, n, k, times = self
        return self, Product(part, m, k, n, times), Product(part, n, k, m, times)


class Move(NamedTuple):
    """A collective: `size_bytes` is what it makes or takes on each device, whichever is more. `beside` is the product
    that it feeds or ends, which can run at the same time in pieces."""

    verb: Verb
    axis: str
    size_bytes: float
    beside: Product | None = None


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """Of one block on one device, for one micro-batch.

    `dense` and `expert` are parameters. Activations that the backward pass needs: `kept_bytes` by policy, of which
    `routed_bytes` grow with the imbalance. `working_bytes` is what a pass needs at once besides. `products`, `core` (an
    attention product's FLOPs) and `moves` are of the forward pass, `vector_bytes` what memory-bound operators read and
    write in it, `routed_vector_bytes` those on rows of experts; `num_operators` how many are launched.
    """

    dense: int
    expert: int
    kept_bytes: dict[str, float]
    routed_bytes: dict[str, float]
    working_bytes: float
    products: tuple[Product, ...]
    core_flops: float
    vector_bytes: float
    routed_vector_bytes: float
    moves: tuple[Move, ...]
    num_operators: int


def kind_of(job: Job, layer: int) -> int:
    """The first layer that costs as much as this one."""
    return kinds_of(job)[layer]


@lru_cache(maxsize=64)
def kinds_of(job: Job) -> tuple[int, ...]:
    """`kind_of` every layer, those of multi-token prediction last."""
    model = job.model
    seen: dict[tuple[bool, bool], int] = {}
    kinds = []
    depth = model.mtp.depth if model.mtp is not None else 0
    for layer in range(model.num_layers + depth):
        key = (model.is_moe(layer), layer in model.attention.window_layers)
        kinds.append(seen.setdefault(key, layer))
    return tuple(kinds)


@lru_cache(maxsize=64)
def _parameters(job: Job) -> dict[str, tuple[int, ...]]:
    return parameter_shapes(job.model)


@lru_cache(maxsize=4096)
def block_cost(job: Job, cut: Slice, kind: int) -> BlockCost:
    """The costs of a block of a kind (`kind_of`)."""
    dense, expert = block_parameters(job, cut, kind)
    t = tokens(job, cut)
    kept, routed = _kept(job, cut, kind)
    products = tuple(_products(job, cut, kind))
    a = job.activation_bytes
    return BlockCost(
        dense=dense,
        expert=expert,
        kept_bytes=kept,
        routed_bytes=routed,
        working_bytes=_working(job, cut, kind),
        products=products,
        core_flops=t * core_flops_per_token(job, kind) / cut.tp,
        vector_bytes=t * a * _vector_elements(job, cut, kind),
        routed_vector_bytes=t / cut.tp * a * _routed_elements(job, cut, kind),
        moves=tuple(_moves(job, cut, kind)),
        num_operators=_num_operators(job, kind),
    )


def _num_operators(job: Job, kind: int) -> int:
    """Kernels of a forward pass besides those of experts, as profiles of such blocks have them: about 25, half as many
    more where attention is not one kernel, and about 50 for routing and sorting tokens by expert."""
    return (25 if job.engine.flash else 37) + (50 if job.model.is_moe(kind) else 0)


def tokens(job: Job, cut: Slice) -> float:
    """t."""
    return cut.micro_sequences * job.seq_len / cut.cp


@lru_cache(maxsize=16384)
def block_parameters(job: Job, cut: Slice, kind: int) -> tuple[int, int]:
    """Parameters of a block on one device: of the dense part, of the experts. Matrices that tp cuts, and biases of
    queries, keys and values, are cut evenly; everything else is whole on every rank."""
    prefix = f"layers.{kind}." if kind < job.model.num_layers else f"mtp.{kind - job.model.num_layers}.block."
    dense = expert = 0
    for name, shape in _parameters(job).items():
        if not name.startswith(prefix):
            continue
        size = prod(shape)
        if ".experts." in name:
            expert += size // (cut.ep * cut.etp)
        elif any(part in name for part in ("qkv", "attn.q.", "q_up", "kv_up", "attn.out.weight", ".w13.", ".w2.")):
            if job.plain_ffn and "ffn.w13" in name:
                size //= 2
            dense += -(-size // cut.tp)
        else:
            dense += size
    return dense, expert


def core_flops_per_token(job: Job, kind: int) -> float:
    """Of scores and of scores times values, with the mask's empty half left out."""
    model = job.model
    window = model.attention.window
    most = min(job.seq_len, window) if window is not None and kind in model.attention.window_layers else job.seq_len
    return model.num_heads * (model.head_size + model.value_size) * (2 * most - most * most / job.seq_len)


def _kept(job: Job, cut: Slice, kind: int) -> tuple[dict[str, float], dict[str, float]]:
    """Korthikanti et al. (2022), section 4, equations 1 to 6, whose 34 s b h + 5 a s^2 b is the sum for H Z = D,
    F = 4 D, 16 bits, dropout and stored scores. `selective` leaves out what `Engine.selective` names; with fp8,
    what only goes into a matrix product is kept in 8 bits."""
    model, engine, a, t = job.model, job.engine, job.activation_bytes, tokens(job, cut)
    masks = 1 if engine.dropout else 0
    whole = t / cut.tp if cut.sequence_parallel else t
    D, cut_t = model.hidden, t / cut.tp
    norms = whole * D * a
    b = 1 if job.precision == "fp8" else a  # of what goes into a matrix product
    normed = whole * D * b
    inputs = 2 * norms + normed + 2 * whole * D * masks  # of both norms and of attention, and the masks of both sums
    heads = cut_t * a * _attention_width(job)
    if (mla := model.attention.mla) is not None:
        inputs += whole * a * (2 * (mla.q_latent or 0) + 2 * mla.kv_latent + mla.rope_dim)
    scores = cut_t * model.num_heads * ((2 * a + 1) * job.seq_len if not engine.flash else FP32_BYTES)
    if engine.flash and not engine.dropout:
        scores = cut_t * model.num_heads * FP32_BYTES
    routed = acts = routed_acts = 0.0
    wide = normed  # the feed-forward's input
    if model.moe is not None and model.is_moe(kind):
        moe = model.moe
        rows = cut_t * moe.top_k
        wide += whole * moe.num_experts * FP32_BYTES * 2 + cut_t * a * 2 * moe.shared_ffn
        acts += cut_t * b * moe.shared_ffn
        routed += rows * (b * D * cut.etp + 2 * a * moe.ffn) + (0 if engine.expert_scores_early else rows * a * D)
        routed_acts = rows * b * moe.ffn
    else:
        wide += cut_t * a * model.ffn * (1 if job.plain_ffn else 2)
        acts += cut_t * b * model.ffn
    everything = inputs + heads + scores + wide + acts
    later = {"scores": 0.0 if engine.flash else scores, "activations": acts, "norms": 2 * normed}
    later["latents"] = heads - cut_t * a * model.num_heads * model.value_size if mla is not None else 0.0
    later["attention"] = normed + heads + scores
    later["core"] = later["scores"]
    left = sum(size for name, size in later.items() if name in engine.selective)
    left_routed = routed_acts if "activations" in engine.selective else 0
    if "experts" in engine.selective:
        left_routed = routed + routed_acts
    if "products" in engine.selective:
        made = sum(product.m * product.n * product.times for product in _products(job, cut, kind)) * a
        left = everything - min(everything, norms + cut_t * a * model.num_heads * model.value_size + made / 2)
    full = t * D * a / (cut.tp if cut.sequence_parallel and engine.shares_inputs else 1)
    kept = {"none": everything, "selective": everything - left, "full": full}
    return kept, {"none": routed + routed_acts, "selective": routed + routed_acts - left_routed, "full": 0.0}


def _attention_width(job: Job) -> int:
    """Elements of queries, keys, values and outputs of a token."""
    model = job.model
    if model.attention.mla is not None:
        return model.num_heads * (2 * model.head_size + 2 * model.value_size)
    return (model.num_heads + model.num_kv_heads) * (model.head_size + model.value_size)


def _working(job: Job, cut: Slice, kind: int) -> float:
    """What the backward pass of the feed-forward needs at once: its gathered input and that one's gradient, gradients
    of its inside, and the gradient of the widest matrix before it is summed, in fp32."""
    model, a, t = job.model, job.activation_bytes, tokens(job, cut)
    D, cut_t = model.hidden, t / cut.tp
    gathered = 2 * t * D * a if cut.sequence_parallel else 0
    products = list(_products(job, cut, kind))
    widest = max(product.n * product.k for product in products) * min(FP32_BYTES, job.engine.gradient_bytes)
    if model.moe is not None and model.is_moe(kind):
        return gathered + widest + cut_t * model.moe.top_k * a * 2 * model.moe.ffn
    return gathered + widest + cut_t * a * model.ffn * (1 if job.plain_ffn else 2)


def _products(job: Job, cut: Slice, kind: int) -> Iterator[Product]:
    model, t = job.model, tokens(job, cut)
    D, H, G, Z, Y = model.hidden, model.num_heads, model.num_kv_heads, model.head_size, model.value_size
    if (mla := model.attention.mla) is not None:
        part = t / cut.tp if cut.sequence_parallel else t
        if mla.q_latent is not None:
            yield Product("attention", part, mla.q_latent, D)
        yield Product("attention", t, H * Z / cut.tp, mla.q_latent or D)
        yield Product("attention", part, mla.kv_latent + mla.rope_dim, D)
        yield Product("attention", t, H * (mla.nope_dim + Y) / cut.tp, mla.kv_latent)
    else:
        yield Product("attention", t, (H * Z + 2 * max(G, cut.tp) * Z) / cut.tp, D)
    yield Product("attention", t, D, H * Y / cut.tp)
    if model.moe is None or not model.is_moe(kind):
        yield Product("feed-forward", t, model.ffn * (1 if job.plain_ffn else 2) / cut.tp, D)
        yield Product("feed-forward", t, D, model.ffn / cut.tp)
        return
    moe, experts = model.moe, model.moe.num_experts // cut.ep
    rows = t / cut.tp * moe.top_k * cut.etp / experts
    yield Product("experts", t / cut.tp, moe.num_experts, D)
    yield Product("experts", rows, 2 * moe.ffn / cut.etp, D, experts)
    yield Product("experts", rows, D, moe.ffn / cut.etp, experts)
    if moe.shared_ffn:
        yield Product("feed-forward", t, 2 * moe.shared_ffn / cut.tp, D)
        yield Product("feed-forward", t, D, moe.shared_ffn / cut.tp)


def _vector_elements(job: Job, cut: Slice, kind: int) -> float:
    """Read and written by norms, sums, rotation, activation, sorting by expert, for one of t tokens."""
    model = job.model
    D = model.hidden / (cut.tp if cut.sequence_parallel else 1)
    found = 12 * D + 4 * _attention_width(job) / cut.tp
    if not job.engine.flash:
        found += 10 * model.num_heads * job.seq_len / cut.tp
    if model.moe is None or not model.is_moe(kind):
        if not job.plain_ffn:
            return found + 3 * model.ffn / cut.tp
        return found + 2 * model.ffn / cut.tp + (0 if job.engine.fuses_biases else 8 * D + 2 * model.ffn / cut.tp)
    return found + 3 * model.moe.shared_ffn / cut.tp + 8 * model.moe.num_experts / cut.tp


def _routed_elements(job: Job, cut: Slice, kind: int) -> float:
    """For one of t / tp tokens: rows are copied for each of K experts and added up again here; where they arrive, which
    etp cuts in width and not in number, they are sorted by expert and back."""
    moe = job.model.moe
    if moe is None or not job.model.is_moe(kind):
        return 0.0
    return moe.top_k * (4 * job.model.hidden + 4 * job.model.hidden * cut.etp + 3 * moe.ffn)


def _moves(job: Job, cut: Slice, kind: int) -> Iterator[Move]:
    model, t, a = job.model, tokens(job, cut), job.activation_bytes
    whole = t * model.hidden * a
    is_moe = model.moe is not None and model.is_moe(kind)
    if cut.tp > 1:
        products = list(_products(job, cut, kind))
        for part in ("attention", "feed-forward"):
            of_part = [product for product in products if product.part == part]
            if not of_part:
                continue
            if cut.sequence_parallel or (is_moe and part == "feed-forward"):  # shared experts' stream is always split
                yield Move("all_gather", "tp", whole, of_part[0])
                yield Move("reduce_scatter", "tp", whole, of_part[-1])
            else:
                yield Move("all_reduce", "tp", whole, of_part[-1])
        if is_moe and not cut.sequence_parallel:
            yield Move("all_gather", "tp", whole)
    if cut.cp > 1:
        pairs = t * a * model.num_kv_heads * (model.head_size + model.value_size) / cut.tp
        if cut.context == "ring":
            yield Move("ring", "cp", pairs * cut.cp)
        else:
            queries = t * a * model.num_heads * (model.head_size + model.value_size) / cut.tp
            yield Move("all_to_all", "cp", queries + pairs)
    if is_moe and model.moe is not None:
        rows = whole / cut.tp * model.moe.top_k
        if cut.ep > 1:
            yield Move("all_to_all", "ep", rows)
            yield Move("all_to_all", "ep", rows)
        if cut.etp > 1:
            yield Move("all_gather", "etp", rows * cut.etp)
            yield Move("reduce_scatter", "etp", rows * cut.etp)
