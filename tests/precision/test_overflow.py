"""The operation that first returns infinity or NaN."""

import contextlib

import pytest
import torch
from torch import nn

from naranhi.precision import NonFinite, first_nonfinite


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return x + self.inner(x)


def model():
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), Residual(), nn.Linear(4, 4, bias=False))
    for param in layers.parameters():
        nn.init.eye_(param)
    return layers.half()


def test_a_product():
    layers = model()
    with torch.no_grad():
        layers[1].inner.weight.fill_(30_000)
    found = first_nonfinite(layers, torch.ones(2, 4, dtype=torch.float16))
    assert found == NonFinite("1.inner", "aten.mm.default", "inf", 30_000.0)


def test_a_residual_is_its_module_s_own():
    found = first_nonfinite(model(), torch.full((2, 4), 40_000.0, dtype=torch.float16))
    assert found == NonFinite("1", "aten.add.Tensor", "inf", 40_000.0)


def test_an_operation_in_place():
    class InPlace(Residual):
        def forward(self, x):
            y = self.inner(x)
            y += x
            return y

    layers = model()
    layers[1] = InPlace().half()
    nn.init.eye_(layers[1].inner.weight)
    found = first_nonfinite(layers, torch.full((2, 4), 40_000.0, dtype=torch.float16))
    assert found == NonFinite("1", "aten.add_.Tensor", "inf", 40_000.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.empty(x.shape),
        torch.empty_like,
        lambda x: torch.empty_strided(x.shape, x.stride()),
        lambda x: x.new_empty(x.shape),
        lambda x: x.new_empty_strided(x.shape, x.stride()),
        lambda x: torch.empty_permuted(x.shape, (0,)),
        lambda x: torch.zeros(0).resize_(x.shape),
        lambda x: torch.zeros(0).resize_as_(x),
    ],
)
def test_memory_that_is_not_written_yet_is_not_blamed(make):
    class Copies(nn.Module):
        def forward(self, x):
            return make(x).copy_(x) * x

    torch.use_deterministic_algorithms(True)  # fills what is not written yet with NaN
    try:
        assert first_nonfinite(Copies(), torch.ones(3)) is None
        found = first_nonfinite(Copies(), torch.full((3,), 2.0**100))
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == NonFinite("", "aten.mul.Tensor", "inf", 2.0**100)


def test_complex_values():
    class Square(nn.Module):
        def forward(self, x):
            z = torch.complex(x, 2 * x).conj()
            return (z * z).abs()

    found = first_nonfinite(Square(), torch.full((3,), 1e30))
    assert found[:3] == ("", "aten.mul.Tensor", "nan") and found.largest == pytest.approx(2e30)
    assert first_nonfinite(Square(), torch.ones(3)) is None


def test_fp8():
    class Rounds(nn.Module):
        def forward(self, x):
            return x.to(torch.float8_e4m3fn).float() + x.to(torch.float8_e5m2).float()

    assert first_nonfinite(Rounds(), torch.ones(3)) is None
    found = first_nonfinite(Rounds(), torch.full((3,), 1e6))
    assert found == NonFinite("", "aten._to_copy.default", "inf", 1e6)


def test_nan():
    class Zero(nn.Module):
        def forward(self, x):
            return (x - x) / (x - x)

    found = first_nonfinite(nn.Sequential(nn.Identity(), Zero()), torch.ones(2))
    assert found == NonFinite("1", "aten.div.Tensor", "nan", 0.0)


def test_all_finite_and_nothing_left_behind():
    layers = model()
    assert first_nonfinite(layers, torch.ones(2, 4, dtype=torch.float16)) is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in layers.modules())


def test_hooks_are_removed_after_an_error():
    layers = model()
    try:
        first_nonfinite(layers, torch.ones(2, 5, dtype=torch.float16))
    except RuntimeError as error:
        assert "mat1 and mat2" in str(error)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in layers.modules())


def test_a_shared_module_and_inputs_that_are_not_finite():
    layer = nn.Linear(4, 4, bias=False)
    assert first_nonfinite(nn.Sequential(layer, layer), torch.full((1, 4), float("nan"))) is None


def test_the_first_of_two():
    class Twice(nn.Module):
        def forward(self, x):
            return x * x, x + x

    found = first_nonfinite(Twice(), torch.full((2,), 40_000.0, dtype=torch.float16))
    assert found == NonFinite("", "aten.mul.Tensor", "inf", 40_000.0)


def test_memory_that_is_written_to_is_not_an_input():
    memory = torch.full((2, 2), float("nan"))

    class Out(nn.Module):
        def forward(self, x):
            return torch.mm(x, x, out=memory) + 1

    found = first_nonfinite(Out(), torch.full((2, 2), 1e30))
    assert found == NonFinite("", "aten.mm.out", "inf", torch.tensor(1e30).item())


def test_a_hook_of_the_model_itself_is_within_it():
    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(lambda module, inputs: (inputs[0].log(),))
    assert first_nonfinite(layer, torch.zeros(1, 2)) == NonFinite("", "aten.log.default", "inf", 0)


def test_a_module_that_raised_is_left():
    class Raises(nn.Module):
        def forward(self, x):
            raise ValueError

    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.raises = Raises()

        def forward(self, x):
            with contextlib.suppress(ValueError):
                self.raises(x)
            return x.log()

    found = first_nonfinite(Catches(), torch.zeros(2))
    assert found == NonFinite("", "aten.log.default", "inf", 0)


# NaN in fp16, where nothing has been written yet.
def unwritten(*shape):
    return torch.empty(shape, dtype=torch.float16)


@pytest.fixture
def filled():
    torch.use_deterministic_algorithms(True)  # fills what is not written yet with NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "write, operation, largest",
    [
        (lambda x: unwritten(3).copy_(x), "copy_.default", 1e6),
        (lambda x: torch._foreach_copy_([unwritten(3)], [x]), "_foreach_copy_.default", 1e6),
        (lambda x: unwritten(3).fill_(x[0]), "fill_.Tensor", 1e6),
        (lambda x: unwritten(3).normal_(0, 1e38), "normal_.default", 0.0),
    ],
)
def test_what_an_operation_overwrites_is_not_its_input(filled, write, operation, largest):
    class Writes(nn.Module):
        def forward(self, x):
            write(x)
            return x

    found = first_nonfinite(Writes(), torch.full((3,), 1e6))
    assert found == NonFinite("", f"aten.{operation}", found.kind, largest)


def test_an_operation_that_returns_nothing():
    class Each(nn.Module):
        def forward(self, x):
            both = [x * 1, x * 2]
            torch._foreach_mul_(both, 2.0**100)
            torch._foreach_mul_(both, 2.0**100)
            return both[0]

    found = first_nonfinite(Each(), torch.ones(3))
    assert found == NonFinite("", "aten._foreach_mul_.Scalar", "inf", 2.0**101)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("to_sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_sparse_values(to_sparse):
    class Graph(nn.Module):
        def forward(self, x):
            return torch.sparse.mm(to_sparse(torch.eye(3)), x) * 1e30

    assert first_nonfinite(Graph(), torch.ones(3, 3)) is None
    found = first_nonfinite(Graph(), torch.full((3, 3), 2.0**100))
    assert found == NonFinite("", "aten.mul.Tensor", "inf", 2.0**100)
