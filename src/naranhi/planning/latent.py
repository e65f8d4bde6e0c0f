"""The sizes of multi-head latent attention."""

from typing import NamedTuple

from naranhi.planning.arguments import check_least, whole


class Latent(NamedTuple):
    """Multi-head latent attention: keys and values come from one small vector for each token.

    Attributes:
        query_rank: Size of the latent query, or 0 if queries come from the hidden state.
        key_rank: Size of the latent vector of keys and values.
        rotary_dim: Elements of each key that carry the position, shared by all heads.
        key_dim: The other elements of each head's key.
        value_dim: Elements of each head's value.

    Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.
    """

    query_rank: int
    key_rank: int
    rotary_dim: int
    key_dim: int
    value_dim: int


def check_latent(latent: Latent) -> Latent:
    """Return the sizes as whole numbers.

    Raises:
        TypeError: If `latent` is not a Latent, or a size is not a whole number.
        ValueError: If a size is too small.
    """
    if not isinstance(latent, Latent):
        raise TypeError(f"latent is a Latent(query_rank, key_rank, ...), not {latent!r}")
    sizes = Latent(*map(whole, latent._fields, latent))
    for name, size in sizes._asdict().items():
        check_least(name, size, 0 if name == "query_rank" else 1)
    return sizes
