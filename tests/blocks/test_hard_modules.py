"""Modules and calls that are hard on a chain: the bits of a plain loop, or an error that says why not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import lowtide
from helpers.chain_cases import BATCH, DIM, Loop, Residual, assert_chain_exact, random_batches
from helpers.exactness import DropEverything
from lowtide import errors

DROP = DropEverything(again=True)


def exact(make: Callable[[], nn.Module], shape: tuple[int, ...], *, number: int = 4, **how: Any) -> None:
    """Compare a chain of such blocks with a loop over them."""
    generator = torch.Generator().manual_seed(3)
    batches = [((torch.randn(shape, generator=generator).requires_grad_(),), {}) for _ in range(3)]
    torch.manual_seed(0)
    blocks = [make() for _ in range(number)]
    assert_chain_exact(copy.deepcopy(blocks), batches, planner=DROP, **how)
    assert_chain_exact([blocks[0]] * 3, batches, planner=DROP, **how)


class First(nn.Module):
    """A module that returns more than its output, as a block."""

    def __init__(self, module: nn.Module, *, times: int = 1, **how: Any) -> None:
        super().__init__()
        self.module, self.times, self.how = module, times, how

    def forward(self, x: Tensor) -> Tensor:
        result = self.module(*[x] * self.times, **self.how)
        weights = result[1] if self.times > 1 and result[1] is not None else None
        return torch.tanh(result[0] if weights is None else result[0] * (1 + weights.mean()))


RECURRENT = {
    "LSTM": lambda: nn.LSTM(DIM, DIM),
    "LSTM of two layers with dropout": lambda: nn.LSTM(DIM, DIM, num_layers=2, dropout=0.3, batch_first=True),
    "LSTM with projection": lambda: nn.LSTM(DIM, 2 * DIM, proj_size=DIM),
    "GRU in both directions": lambda: nn.GRU(DIM, DIM // 2, bidirectional=True),
    "RNN with relu": lambda: nn.RNN(DIM, DIM, nonlinearity="relu"),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_modules(name: str) -> None:
    exact(lambda: First(RECURRENT[name]()), (7, 5, DIM))


@pytest.mark.parametrize("how", [{"need_weights": True}, {"need_weights": True, "average_attn_weights": False}])
def test_attention_with_weights(how: dict[str, bool]) -> None:
    exact(lambda: First(nn.MultiheadAttention(DIM, 3, dropout=0.2, batch_first=True), times=3, **how), (4, 6, DIM))


def test_attention_without_weights_and_with_everything_else() -> None:
    def make() -> nn.Module:
        return First(nn.MultiheadAttention(DIM, 2, add_bias_kv=True, add_zero_attn=True), times=3, need_weights=False)

    exact(make, (6, 4, DIM))


def test_transformer_layers() -> None:
    exact(lambda: nn.TransformerEncoderLayer(DIM, 3, 24, batch_first=True), (4, 6, DIM))


class Bag(nn.Module):
    """Bags of embeddings that the state chooses."""

    def __init__(self, mode: str, **how: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(40, DIM, mode=mode, **how)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.detach().abs() * 10).long().clamp(0, 39)
        return torch.tanh(x + self.bag(chosen))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings(mode: str) -> None:
    exact(lambda: Bag(mode), (BATCH, DIM))


def test_bags_with_weights_and_padding() -> None:
    exact(lambda: Bag("mean", padding_idx=3, scale_grad_by_freq=True), (BATCH, DIM))


class Folds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unfold, self.mix = nn.Unfold(3, padding=1), nn.Linear(27, 27)
        self.fold = nn.Fold((6, 6), 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fold(self.mix(self.unfold(x).transpose(1, 2)).transpose(1, 2)))


def test_fold_and_unfold() -> None:
    exact(Folds, (4, 3, 6, 6))


CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "transposed": lambda: nn.ConvTranspose2d(3, 3, 3, padding=1),
    "transposed and back": lambda: nn.Sequential(
        nn.ConvTranspose2d(3, 5, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(5, 3, 4, stride=2, padding=1)
    ),
    "circular": lambda: nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"),
    "reflected": lambda: nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"),
    "grouped and dilated": lambda: nn.Conv2d(3, 3, 3, padding=2, dilation=2, groups=3),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions(name: str, channels_last: bool) -> None:
    def make() -> nn.Module:
        made = nn.Sequential(CONVOLUTIONS[name](), nn.BatchNorm2d(3), nn.Tanh())
        return made.to(memory_format=torch.channels_last) if channels_last else made

    generator = torch.Generator().manual_seed(3)
    form = torch.channels_last if channels_last else torch.contiguous_format
    rows = [torch.randn(4, 3, 6, 6, generator=generator).to(memory_format=form) for _ in range(3)]
    torch.manual_seed(0)
    assert_chain_exact([make() for _ in range(4)], [((row.requires_grad_(),), {}) for row in rows], planner=DROP)


def test_one_and_three_dimensional_transposed_convolutions() -> None:
    exact(lambda: nn.Sequential(nn.ConvTranspose1d(3, 3, 3, padding=1), nn.Tanh()), (4, 3, 9))
    exact(lambda: nn.Sequential(nn.ConvTranspose3d(2, 2, 3, padding=1), nn.Tanh()), (2, 2, 4, 4, 4))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM), nn.Tanh())


def pruned(how: Callable[[nn.Module], Any]) -> nn.Module:
    made = linear()
    how(made[0])
    return made


PRUNED: dict[str, Callable[[nn.Module], Any]] = {
    "l1": lambda module: prune.l1_unstructured(module, "weight", 0.4),
    "structured": lambda module: prune.ln_structured(module, "weight", 0.3, n=2, dim=0),
    "twice": lambda module: prune.random_unstructured(prune.l1_unstructured(module, "weight", 0.2), "weight", 0.5),
    "bias": lambda module: prune.l1_unstructured(module, "bias", 2),
}
NORMALISED: dict[str, Callable[[nn.Module], Any]] = {
    "spectral": parametrizations.spectral_norm,
    "spectral as before": nn.utils.spectral_norm,
    "weight": parametrizations.weight_norm,
    "weight as before": nn.utils.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", [*PRUNED, *NORMALISED])
def test_pruned_and_normalised_weights(name: str) -> None:
    """Copies are made by state: PyTorch does not copy modules with computed weights."""
    how = (PRUNED | NORMALISED)[name]
    results = []
    for chained in (False, True):
        torch.manual_seed(0)
        blocks = [pruned(how) for _ in range(4)]
        model = lowtide.chain(blocks, budget="1TiB", planner=DROP) if chained else Loop(blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,), _ in random_batches():
            loss = model(x).square().sum()
            loss.backward()
            attribute = "bias" if name == "bias" else "weight"
            results.append([loss.item(), *(p.grad.tolist() for p in model.parameters())])
            results[-1] += [tensor.tolist() for tensor in model.state_dict().values()]
            results[-1] += [getattr(block[0], attribute).tolist() for block in blocks]
            optimizer.step()
            optimizer.zero_grad()
    assert results[:3] == results[3:]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", [*PRUNED, *NORMALISED])
def test_computed_weights_that_are_read_outside(name: str) -> None:
    """They have their gradients; where these come in several parts, the last bits depend on the order of additions."""
    how = (PRUNED | NORMALISED)[name]
    results = []
    for chained in (False, True):
        torch.manual_seed(0)
        blocks = [pruned(how) for _ in range(4)]
        model = lowtide.chain(blocks, budget="1TiB", planner=DROP) if chained else Loop(blocks)
        ((x,), _), *_ = random_batches()
        attribute = "bias" if name == "bias" else "weight"
        loss = model(x).square().sum() + sum(getattr(block[0], attribute).square().sum() for block in blocks)
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_parametrised_weights_that_are_cached_are_refused() -> None:
    blocks = [pruned(parametrizations.spectral_norm) for _ in range(3)]
    chained = lowtide.chain(blocks, budget="1TiB", planner=DROP)
    with parametrize.cached(), pytest.raises(errors.InvalidModelError, match=r"parametrize\.cached"):
        chained(torch.randn(BATCH, DIM))
    chained(torch.randn(BATCH, DIM)).sum().backward()


class Emphatic(nn.Module):
    """Embeds what the state chooses, with sparse gradients or a limit for the weights."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, DIM, **how)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.embedding((x.detach().abs() * 10).long().clamp(0, 29)[:, 0]))


@pytest.mark.parametrize("shared", [False, True])
def test_sparse_gradients(shared: bool) -> None:
    results = []
    for chained in (False, True):
        torch.manual_seed(0)
        blocks = [Emphatic(sparse=True)] * 3 if shared else [Emphatic(sparse=True) for _ in range(4)]
        model = lowtide.chain(blocks, budget="1TiB", planner=DROP) if chained else Loop(blocks)
        ((x,), _) = random_batches()[0]
        model(x).sum().backward()
        results.append([parameter.grad.to_dense().tolist() for parameter in model.parameters()])
    assert results[0] == results[1]


def test_embeddings_that_change_their_weights_are_refused() -> None:
    block = Emphatic(max_norm=0.5)
    before = block.embedding.weight.detach().clone()
    chained = lowtide.chain([block, linear()], budget="1TiB", planner=DROP)
    with pytest.raises(errors.InvalidModelError, match=r"Block 0 \(Emphatic\) changes its parameter 'weight'"):
        chained(torch.randn(BATCH, DIM))
    assert torch.equal(block.embedding.weight, before)


LAZY: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.LazyLinear(DIM),
    "nested": lambda: nn.Sequential(nn.Tanh(), nn.LazyLinear(DIM)),
    "norm": lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.LazyBatchNorm1d()),
    "function": lambda: _function_of(nn.LazyLinear(DIM)),
}


def _function_of(module: nn.Module) -> Any:
    return lambda x: module(x).tanh()


@pytest.mark.parametrize("name", LAZY)
def test_lazy_modules(name: str) -> None:
    chained = lowtide.chain([LAZY[name](), nn.Linear(DIM, DIM)], budget="1TiB", planner=DROP)
    x = torch.randn(BATCH, DIM)
    with pytest.raises(errors.InvalidModelError, match=r"no shape yet.*torch\.no_grad"):
        chained(x)
    with torch.no_grad():
        chained(x)
    chained(x).sum().backward()
    assert chained.plans


def test_lazy_layers_of_a_model() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.LazyLinear(DIM), nn.Tanh()) for _ in range(3))
            self.head = nn.Linear(DIM, 1)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    model = lowtide.chain_layers(Model(), "layers", budget="1TiB", planner=DROP)
    with pytest.raises(errors.InvalidModelError, match="no shape yet"):
        model(torch.randn(BATCH, DIM))


def _jvp(model: nn.Module, x: Tensor) -> Any:
    return torch.func.jvp(model, (x,), (torch.ones_like(x),))


def _dual(model: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))


def _functional(model: nn.Module, x: Tensor) -> Any:
    parameters = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return torch.func.grad(lambda given: torch.func.functional_call(model, given, (x,)).sum())(parameters)


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "dual": _dual,
    "jvp": _jvp,
    "grad": lambda model, x: torch.func.grad(lambda given: model(given).sum())(x),
    "vjp": lambda model, x: torch.func.vjp(model, x),
    "vmap": lambda model, x: torch.vmap(model)(x),
    "jacrev": lambda model, x: torch.func.jacrev(lambda given: model(given).sum(0))(x),
    "functional": _functional,
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("planned", [False, True])
def test_transforms_are_refused_in_training(name: str, planned: bool) -> None:
    chained = lowtide.chain([linear() for _ in range(4)], budget="1TiB", planner=DROP)
    x = torch.randn(BATCH, DIM)
    if planned:
        chained(x).sum().backward()
    with pytest.raises(errors.UnsupportedBackwardError, match=r"torch\.func|forward_ad"):
        TRANSFORMS[name](chained, x)
    chained.zero_grad()
    chained(x).sum().backward()
    assert chained[0][0].weight.grad is not None


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_in_eval_mode_are_plain(name: str) -> None:
    blocks = [linear() for _ in range(3)]
    chained, plain = lowtide.chain(blocks, budget="1TiB", planner=DROP).eval(), nn.Sequential(*blocks)
    x = torch.randn(BATCH, DIM)
    results = [torch.utils._pytree.tree_leaves(TRANSFORMS[name](model, x)) for model in (plain, chained)]
    tensors = [[leaf for leaf in leaves if isinstance(leaf, Tensor)] for leaves in results]
    assert tensors[0]
    assert all(torch.equal(one, other) for one, other in zip(*tensors, strict=True))


class Tagged(torch.Tensor):
    """A tensor with a class of its own."""


def _subclass(x: Tensor) -> Tensor:
    return x.as_subclass(Tagged)


@pytest.mark.parametrize("make", [_subclass, Tensor.to_sparse, torch.sparse_coo_tensor])
def test_unusual_inputs_are_refused(make: Callable[[Any], Tensor]) -> None:
    chained = lowtide.chain([linear() for _ in range(3)], budget="1TiB", planner=DROP)
    x = torch.randn(BATCH, DIM)
    given = make(x.to_sparse().indices(), x.to_sparse().values()) if make is torch.sparse_coo_tensor else make(x)
    with pytest.raises(errors.InvalidInputError, match=r"Input 0 of the chain is a .*torch\.Tensor"):
        chained(given)


def test_unusual_results_and_arguments_are_refused() -> None:
    x = torch.randn(BATCH, DIM)
    chained = lowtide.chain([linear(), _subclass, linear()], budget="1TiB", planner=DROP)
    with pytest.raises(errors.InvalidModelError, match=r"Block 1 \(_subclass\) returned a Tagged"):
        chained(x)
    chained = lowtide.chain([lambda x, y: x * y] * 3, budget="1TiB", planner=DROP)
    with pytest.raises(errors.InvalidInputError, match=r"An extra argument .* is a Tagged"):
        chained(x.requires_grad_(), y=_subclass(torch.ones(DIM)).requires_grad_())


class UserError(Exception):
    """An error of the user's own."""


class Raising(nn.Module):
    """Raises for some inputs, after it has changed things."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = Residual(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.inner(x)
        if x.abs().max() > 1e3:
            raise UserError("too large", 7)
        return x


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_errors_of_the_user_arrive_as_they_are(bad: int) -> None:
    """Training goes on after a batch that was skipped, with the bits of plain training."""
    results = []
    for chained in (False, True):
        torch.manual_seed(0)
        blocks = [Raising() for _ in range(4)]
        model = lowtide.chain(blocks, budget="1TiB", planner=DROP) if chained else Loop(blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        for number, ((x,), _) in enumerate(random_batches()):
            given = x.detach() * (1e5 if number == bad else 1.0)
            row: list[Any] = [number]
            try:
                loss = model(given).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                row.append(loss.item())
            except UserError as error:
                row += [error.args, type(error)]
            row += [block.calls for block in blocks] + [tensor.tolist() for tensor in model.state_dict().values()]
            results.append([*row, torch.get_rng_state().tolist()])
    assert results[:3] == results[3:]
    assert sum(UserError in row for row in results) == 2


def test_a_note_says_which_block_failed() -> None:
    chained = lowtide.chain([nn.Linear(DIM, 7), nn.Linear(DIM, DIM)], budget="50%")
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        chained(torch.randn(BATCH, DIM))
    assert any("Block 1 (Linear)" in note and "(24, 7)" in note for note in caught.value.__notes__)


WRONG: dict[str, Callable[[], Tensor]] = {
    "double": lambda: torch.randn(BATCH, DIM, dtype=torch.float64),
    "whole numbers": lambda: torch.ones(BATCH, DIM, dtype=torch.int64),
    "shape": lambda: torch.randn(BATCH, DIM + 1),
    "half": lambda: torch.randn(BATCH, DIM).half(),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("budget", ["50%", "1%", 10])
def test_wrong_inputs_show_the_error_of_eager(name: str, budget: Any) -> None:
    blocks = [linear() for _ in range(4)]
    with pytest.raises(RuntimeError) as expected:
        nn.Sequential(*blocks)(WRONG[name]())
    with pytest.raises(RuntimeError) as found:
        lowtide.chain(blocks, budget=budget)(WRONG[name]())
    assert str(found.value) == str(expected.value)
    assert type(found.value) is type(expected.value)


def test_interrupts_leave_nothing() -> None:
    class Interrupted(nn.Linear):
        armed, calls = True, 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.armed:
                raise KeyboardInterrupt
            return F.dropout(super().forward(x), 0.1)

    block = Interrupted(DIM, DIM)
    chained = lowtide.chain([Residual(), block], budget="1TiB", planner=DROP)
    before = copy.deepcopy(chained.state_dict())
    random_state = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        chained(torch.randn(BATCH, DIM, generator=torch.Generator()))
    assert block.calls == 0
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in chained.state_dict().items())
    block.armed = False
    chained(torch.randn(BATCH, DIM)).sum().backward()
    assert block.calls == 1


def _accumulator(parameter: Tensor) -> Any:
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]


HOOKS: dict[str, Callable[[Tensor, list[Any]], Any]] = {
    "before": lambda p, log: _accumulator(p).register_prehook(lambda g: log.append(g[0].sum().item()) or (g[0] * 2,)),
    "after": lambda p, log: _accumulator(p).register_hook(lambda *_: log.append(p.grad.sum().item())),
    "accumulated": lambda p, log: p.register_post_accumulate_grad_hook(lambda q: log.append(q.grad.sum().item())),
    "tensor": lambda p, log: p.register_hook(lambda g: log.append(g.sum().item()) or g * 3),
    "cleared": lambda p, log: p.register_post_accumulate_grad_hook(lambda q: setattr(q, "grad", q.grad * 0.5)),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("shared", [False, True])
def test_hooks_where_gradients_are_added(name: str, shared: bool) -> None:
    results = []
    for chained in (False, True):
        torch.manual_seed(0)
        blocks = [linear()] * 4 if shared else [linear() for _ in range(4)]
        model = lowtide.chain(blocks, budget="1TiB", planner=DROP) if chained else Loop(blocks)
        log: list[Any] = []
        kept = [HOOKS[name](parameter, log) for parameter in model.parameters()]
        accumulators = [_accumulator(parameter) for parameter in model.parameters()]
        for number, ((x,), _) in enumerate(random_batches(steps=6)):
            model(x).sum().backward()
            results.append([sorted(log), *(parameter.grad.tolist() for parameter in model.parameters())])
            if number % 3 == 2:
                model.zero_grad()
        assert len(kept) == len(accumulators)
    assert results[:6] == results[6:]


def test_compiled_chains_run_the_plan() -> None:
    blocks = [linear() for _ in range(4)]
    chained = lowtide.chain(blocks, budget="1TiB", planner=DROP)
    x = torch.randn(BATCH, DIM)
    torch.compile(chained, backend="eager")(x).sum().backward()
    assert chained.plans[0].num_recomputed
    found = [parameter.grad.clone() for parameter in chained.parameters()]
    chained.zero_grad()
    nn.Sequential(*blocks)(x).sum().backward()
    assert all(torch.equal(one, p.grad) for one, p in zip(found, chained.parameters(), strict=True))


def _clamp(parameter: Tensor) -> None:
    parameter.data.clamp_(-0.01, 0.01)


def _through_numpy(parameter: Tensor) -> None:
    parameter.detach().numpy()[0] = 7.0


def _under_a_view(parameter: Tensor) -> None:
    parameter.data.view(-1)[-1:].zero_()


def _replace(parameter: Tensor) -> None:
    parameter.data = parameter.data * 2


def _in_place(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(2)


@pytest.mark.parametrize("change", [_clamp, _through_numpy, _under_a_view])
@pytest.mark.parametrize("what", ["parameter", "input"])
def test_changes_that_pytorch_does_not_notice(change: Callable[[Tensor], None], what: str) -> None:
    """They are found by `verify`; without it they are not."""
    blocks = [linear() for _ in range(4)]
    for verify in (True, False):
        chained = lowtide.chain(blocks, budget="1TiB", planner=DROP, verify=verify)
        x = torch.randn(BATCH, DIM)
        chained(x).sum().backward()
        loss = chained(x).sum()
        change(blocks[1][0].weight if what == "parameter" else x)
        if verify:
            name = "Input 0" if what == "input" else r"Parameter 'weight' of a Linear in Block 1"
            with pytest.raises(errors.VerificationError, match=f"{name}.* was changed"):
                loss.backward()
        else:
            loss.backward()


@pytest.mark.parametrize("change", [_replace, _in_place])
def test_changes_that_show_are_always_noticed(change: Callable[[Tensor], None]) -> None:
    blocks = [linear() for _ in range(4)]
    chained = lowtide.chain(blocks, budget="1TiB", planner=DROP)
    loss = chained(torch.randn(BATCH, DIM)).sum()
    change(blocks[2][0].weight)
    with pytest.raises(errors.UnsupportedBackwardError, match=r"Parameter 'weight' of a Linear in Block 2 .*changed"):
        loss.backward()


def test_verify_for_layers_and_cells() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(linear() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = lowtide.chain_layers(Model(), budget="1TiB", planner=DROP, verify=True)
    cell = nn.GRUCell(DIM, DIM)
    unrolled = lowtide.unroll(cell, budget="1TiB", planner=DROP, chunk=2, verify=True)
    for run, weight in (
        (lambda: model(torch.randn(BATCH, DIM)).sum(), model.layers._modules["1"][0].weight),
        (lambda: unrolled(torch.randn(6, BATCH, DIM))[0].sum(), cell.weight_hh),
    ):
        run().backward()
        loss = run()
        _clamp(weight)
        with pytest.raises(errors.VerificationError, match="was changed"):
            loss.backward()
