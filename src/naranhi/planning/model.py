"""A model for the planner: its shapes, its parameters and its operations.

Units: parameters, tokens, floating-point operations (a multiplication and an addition are two).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from naranhi.planning.arguments import check_least, make_whole
from naranhi.planning.latent import Latent, check_latent

# Of what can be meant: a search goes through the layers, and computes in float64.
MOST_LAYERS, MOST_SIZE = 2**14, 2**40


class Matmul(NamedTuple):
    """A weight matrix that each token is multiplied by: `rows` x `columns`.

    `split` says which of the two sides tensor parallelism shards: "columns", "rows" or "none".
    """

    rows: int
    columns: int
    split: str


@dataclass(frozen=True)
class Model:
    """A decoder-only Transformer.

    Args:
        layers: The number of Transformer layers.
        hidden: The hidden size.
        heads: The number of attention heads.
        ffn: The inner size of the MLP; 4 x `hidden` if None.
        vocabulary: The number of tokens in the vocabulary, including padding.
        kv_heads: The number of heads of keys and values; `heads` if None.
        head_dim: The elements of a head; `hidden` / `heads` if None.
        gated: Whether the MLP has a gate (SwiGLU), and so three matrices in place of two.
        tied: Whether the output layer shares the embedding's weights.
        positions: Rows of a learned position embedding; 0 for rotary positions and the like.
        biases: Whether linear layers and norms have biases, as in GPT-2.
        dropout: Whether dropout keeps masks, as in GPT-2's training.
        experts: The number of experts of each sparse layer; 0 for a dense model.
        top_k: The experts that a token visits.
        expert_ffn: The inner size of an expert; `ffn` if None.
        shared_experts: Experts that every token visits in addition.
        dense_layers: The number of first layers with a dense MLP in a model with experts.
        latent: The sizes of multi-head latent attention, or None.

    Raises:
        TypeError: If a size is not a whole number, a flag not a bool, or `latent` not a Latent.
        ValueError: If a size is too small, or sizes contradict one another.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int | None = None
    vocabulary: int = 50304
    kv_heads: int | None = None
    head_dim: int | None = None
    gated: bool = False
    tied: bool = True
    positions: int = 0
    biases: bool = False
    dropout: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int | None = None
    shared_experts: int = 0
    dense_layers: int = 0
    latent: Latent | None = None

    def __post_init__(self) -> None:
        sizes = "layers", "hidden", "heads", "vocabulary"
        by_default = "ffn", "kv_heads", "expert_ffn"
        counts = "positions", "experts", "top_k", "shared_experts", "dense_layers"
        make_whole(self, *sizes, *counts, optional=(*by_default, "head_dim"))
        if self.ffn is None:
            object.__setattr__(self, "ffn", 4 * self.hidden)
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.expert_ffn is None:
            object.__setattr__(self, "expert_ffn", self.ffn)
        for name in sizes + by_default + counts:
            check_least(name, value := getattr(self, name), 0 if name in counts else 1)
            most = MOST_LAYERS if name == "layers" else MOST_SIZE
            if value > most:
                raise ValueError(f"{name} = {value} cannot be right: it is at most {most:,}")
        for name in ("gated", "tied", "biases", "dropout"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is True or False, not {getattr(self, name)!r}")
        if self.head_dim is None:
            if self.hidden % self.heads:
                raise ValueError(
                    f"hidden = {self.hidden} is not a multiple of heads = {self.heads}; "
                    "if the heads have another size, give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        check_least("head_dim", self.head_dim, 1)
        if self.latent is not None:
            object.__setattr__(self, "latent", check_latent(self.latent))
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}: every "
                "head of keys and values serves equally many heads of queries"
            )
        if bool(self.experts) != bool(self.top_k) or self.top_k > self.experts:
            raise ValueError(
                f"a token visits top_k = {self.top_k} of experts = {self.experts}: give both, "
                "with top_k at least 1 and at most the number of experts, or neither"
            )
        if self.dense_layers > self.layers:
            raise ValueError(f"dense_layers = {self.dense_layers} of only {self.layers} layers")

    @classmethod
    def from_config(cls, path: str | Path | dict[str, Any]) -> "Model":
        """Return the model that a Hugging Face `config.json` describes.

        Args:
            path: The file, the directory that contains it, or its content as a dict.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file is not a JSON object, its family is unknown, or a size or flag
                is missing, wrong, or impossible to express in a `Model`.
        """
        from naranhi.planning.config import read_config

        return cls(**read_config(path))

    def with_layers(self, layers: int) -> "Model":
        """Return the same model with a different number of layers."""
        return replace(self, layers=layers)

    @cached_property
    def attention(self) -> tuple[Matmul, ...]:
        """The weight matrices of a layer's attention."""
        h, a, d = self.hidden, self.heads, self.head_dim
        if self.latent is None:
            return (
                Matmul(h, (a + 2 * self.kv_heads) * d, "columns"),
                Matmul(a * d, h, "rows"),
            )
        q, k, rotary, key, value = self.latent
        queries = (
            (Matmul(h, q, "none"), Matmul(q, a * (key + rotary), "columns"))
            if q
            else (Matmul(h, a * (key + rotary), "columns"),)
        )
        return (
            *queries,
            Matmul(h, k + rotary, "none"),
            Matmul(k, a * (key + value), "columns"),
            Matmul(a * value, h, "rows"),
        )

    def mlp(self, ffn: int | None = None) -> tuple[Matmul, ...]:
        """Return the weight matrices of an MLP of inner size `ffn`, by default the dense one's."""
        inner = ffn or self.ffn
        return (
            Matmul(self.hidden, inner * (2 if self.gated else 1), "columns"),
            Matmul(inner, self.hidden, "rows"),
        )

    def layer_matmuls(self, layer: int) -> tuple[Matmul, ...]:
        """Return the weight matrices that multiply a token in a layer, including its experts'."""
        if self.sparse(layer):
            visited = self.top_k + self.shared_experts
            return self.attention + self.mlp(self.expert_ffn) * visited
        return self.attention + self.mlp()

    @cached_property
    def attention_parameters(self) -> int:
        """The parameters of a layer's attention, with the layer's two norms."""
        norms = 2 * self.hidden * (2 if self.biases else 1)
        return _parameters(self.attention, self.biases) + norms

    @cached_property
    def dense_mlp_parameters(self) -> int:
        """The parameters of a dense MLP."""
        return _parameters(self.mlp(), self.biases)

    @cached_property
    def expert_parameters(self) -> int:
        """The parameters of one expert."""
        return _parameters(self.mlp(self.expert_ffn), self.biases)

    @cached_property
    def embedding_parameters(self) -> int:
        """The parameters of the token embedding; the output layer has as many, if not tied."""
        return self.vocabulary * self.hidden

    def layer_parameters(self, layer: int = 0, expert_parallel: int = 1) -> int:
        """Return the parameters of a layer on a rank with 1/`expert_parallel` of its experts.

        The router of a sparse layer is on every rank.
        """
        if not self.sparse(layer):
            return self.attention_parameters + self.dense_mlp_parameters
        held = self.experts // expert_parallel + self.shared_experts
        return (
            self.attention_parameters + held * self.expert_parameters + self.hidden * self.experts
        )

    def rank_parameters(
        self,
        layer: int,
        tensor_parallel: int,
        expert_parallel: int = 1,
        expert_tensor_parallel: int | None = None,
    ) -> tuple[float, float]:
        """Return the parameters of a layer on a rank: (outside of experts, in its experts).

        Tensor parallel ranks shard all matrices except those of latent vectors and the router:
        these are whole on each rank. (So are norms, which are too small to matter.) Each expert is
        cut over `expert_tensor_parallel` ranks; None means `tensor_parallel`.
        """
        whole = _weights(m for m in self.attention if m.split == "none")
        experts = 0
        if self.sparse(layer):
            whole += self.hidden * self.experts
            experts = self.experts * self.expert_parameters
        sharded = self.layer_parameters(layer) - experts - whole
        pieces = expert_parallel * (expert_tensor_parallel or tensor_parallel)
        return sharded / tensor_parallel + whole, experts / pieces

    def sparse(self, layer: int) -> bool:
        """Return whether that layer, counted from 0, has experts."""
        return self.experts > 0 and layer >= self.dense_layers

    @cached_property
    def parameters(self) -> int:
        """The number of parameters, tied weights once."""
        layers = sum(self.layer_parameters(layer) for layer in range(self.layers))
        return layers + self.end_parameters

    @cached_property
    def end_parameters(self) -> int:
        """The parameters that are in no layer: embeddings, the last norm and the output layer."""
        ends = self.embedding_parameters * (1 if self.tied else 2)
        norm = self.hidden * (2 if self.biases else 1)
        return ends + self.positions * self.hidden + norm

    @cached_property
    def active_parameters(self) -> int:
        """The number of parameters without the experts that a token does not visit.

        An untied input embedding is included, although a token only looks up one of its rows, as
        authors of such models count (Mixtral 8x7B: 12.9 billion).
        """
        idle = self.experts - self.top_k
        sparse = self.layers - self.dense_layers if self.experts else 0
        return self.parameters - sparse * idle * self.expert_parameters

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the model's operations for a token in a step, forward and backward.

        Six for each weight that a token is multiplied with (the embedding is a look-up), and
        attention to all tokens of the sequence, as Megatron-LM's papers and PaLM count model
        FLOPs: a causal kernel that skips the half that is masked is credited with it, and
        recomputation is not counted. (Since 2025 Megatron-LM's own log leaves that half out.)

        Source: Narayanan et al. (2021), equation 3, without the recomputed forward.
        """
        sparse = self.layers - self.dense_layers if self.experts else 0
        weights = (self.layers - sparse) * _weights(self.attention + self.mlp())
        if sparse:
            visited = _weights(self.layer_matmuls(self.layers - 1)) + self.hidden * self.experts
            weights += sparse * visited
        weights += self.embedding_parameters  # of the output layer
        return 6 * weights + 6 * self.layers * sequence_length * self.score_width

    @cached_property
    def score_width(self) -> int:
        """The elements of keys and values, over all heads, that a query meets in each token."""
        if self.latent:
            return self.heads * (
                self.latent.key_dim + self.latent.rotary_dim + self.latent.value_dim
            )
        return 2 * self.heads * self.head_dim


def _weights(matmuls):
    return sum(matmul.rows * matmul.columns for matmul in matmuls)


def _parameters(matmuls, biases):
    return _weights(matmuls) + (sum(matmul.columns for matmul in matmuls) if biases else 0)
