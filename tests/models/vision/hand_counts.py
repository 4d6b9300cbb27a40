"""Parameters of every preset counted by hand, from the tables of configurations in the papers; no model is read.

D: width of a stage, h its heads, M the width of its feed-forward part, N its tokens at 224 pixels.
"""

CLASSES = 1000
PIXELS = 224
_WIDE = {  # dims, depths, heads
    "xt": ((32, 64, 128, 384), (2, 2, 2, 2), (1, 2, 4, 12)),
    "xt_paper": ((32, 64, 192, 384), (2, 2, 4, 2), (1, 2, 6, 12)),
    "t": ((64, 128, 256, 512), (2, 2, 6, 2), (1, 2, 4, 8)),
    "s": ((64, 128, 320, 512), (3, 5, 9, 3), (1, 2, 5, 8)),
    "b": ((96, 192, 384, 512), (4, 6, 12, 6), (1, 2, 6, 8)),
    "l": ((96, 192, 448, 640), (4, 7, 19, 8), (1, 2, 7, 10)),
}
_LIKE = {"b0": "xt", "b1": "xt_paper", "b2": "t", "b3": "s", "b4": "b", "b5": "l"}
_OWN = {"nala": 0, "rala": 0, "pola_plus": 4, "mirror": 3}  # of a mechanism, in units of D


def _linear(inside: int, outside: int) -> int:
    return inside * outside + outside


def _mlp(dim: int, hidden: int, conv: bool = False) -> int:
    return _linear(dim, hidden) + _linear(hidden, dim) + (10 * hidden if conv else 0)


def pyramid(preset: str, size: str, all_linear: bool) -> int:
    """NaLaFormer, PolaFormer++, RALA, MirrorLA."""
    dims, depths, _ = _WIDE[_LIKE.get(size, size)]
    nala = preset == "nala"
    ratio = 4.0 if nala and size in ("t", "b") else 3.5
    half = dims[0] // 2
    total = sum(9 * a * b + 3 * b for a, b in ((3, half), (half, half), (half, half), (half, dims[0])))  # conv, norm
    for i, (dim, depth) in enumerate(zip(dims, depths, strict=True)):
        attention = _linear(dim, 3 * dim) + 2 * _linear(dim, dim) + 26 * dim  # q, k, v; gate and output; 5 x 5
        attention += 2 * dim if nala else 0  # norm of the output
        attention += _OWN[preset] * dim if i < 2 or all_linear else 0
        positions = (2 if nala else 1) * 10 * dim
        total += depth * (attention + positions + 6 * dim + _mlp(dim, int(dim * ratio), conv=True))  # norms and scales
        total += 9 * dims[i - 1] * dim + 3 * dim if i else 0
    wide = {"b5": 2560}.get(size, 2048 if size in _LIKE else 1024)
    return total + _linear(dims[-1], wide) + 2 * wide + _linear(wide, CLASSES)


def _pola(dim: int, heads: int, tokens: int) -> int:
    """Gate, a 5 x 5 convolution that heads share, positions of keys, powers, scales."""
    return _linear(dim, dim) + 26 * (dim // heads) + tokens * dim + 2 * dim


def _block(dim: int, hidden: int) -> int:
    return 4 * dim + _linear(dim, 3 * dim) + _linear(dim, dim) + _mlp(dim, hidden)


def pvt(size: str) -> int:
    dims, heads, ratios = (64, 128, 320, 512), (1, 2, 5, 8), (8, 8, 4, 4)
    depths = {"t": (2, 2, 2, 2), "s": (3, 4, 6, 3), "m": (3, 4, 18, 3), "l": (3, 8, 27, 3)}[size]
    total, before, patch = _linear(dims[-1], CLASSES), 3, 4
    for i, dim in enumerate(dims):
        tokens = (PIXELS // 4 // 2**i) ** 2
        total += _linear(before * patch**2, dim) + 2 * dim + tokens * dim
        total += depths[i] * (_block(dim, ratios[i] * dim) + _pola(dim, heads[i], tokens))
        before, patch = dim, 2
    return total


def swin(size: str) -> int:
    width, deep, first = {"t": (96, 6, 3), "s": (96, 18, 3), "b": (128, 18, 4)}[size]
    total = _linear(48, width) + 2 * width
    for i, depth in enumerate((2, 2, deep, 2)):
        dim, heads, tokens = width * 2**i, first * 2**i, (PIXELS // 4 // 2**i) ** 2
        own = _pola(dim, heads, tokens) if i < 2 else 13**2 * heads  # windows of 7 have a table of places
        total += depth * (_block(dim, 4 * dim) + own)
        total += 4 * dim + 2 * dim * dim if i else 0  # four neighbours of half the width, normed, to one
    return total + 2 * 8 * width + _linear(8 * width, CLASSES)


def deit_lion(size: str) -> int:
    """No positions, a class token, and a decay for each head and each of the two orders' snakes."""
    dim, heads = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}[size]
    return _linear(768, dim) + dim + 12 * (_block(dim, 4 * dim) + 2 * heads) + 2 * dim + _linear(dim, CLASSES)
