"""Merges the comparisons of a laboratory run into one set of results, as the report reads it."""

from typing import Any

JOINT = "positions"


def merged(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Merge results by kind of positions: ``softmax+ABCD 128`` becomes ``softmax+ABCD rotary 128``.

    Example:
        >>> entry = {"mechanism": "elu 64", "series": "elu", "width": 64}
        >>> part = {"meta": {"host": {}}, "mechanisms": [entry], "rows": [{"mechanism": "elu 64", "seed": 0}]}
        >>> merged({"none": part})["mechanisms"][0]["mechanism"]
        'elu none 64'
    """
    first = next(iter(parts.values()))
    meta = {**first["meta"], "host": first["meta"]["host"] | {JOINT: list(parts)}}
    meta["finished"] = all(part["meta"].get("finished", False) for part in parts.values())
    mechanisms: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for kind, part in parts.items():
        names = {}
        for entry in part["mechanisms"]:
            series = f"{entry['series']} {kind}"
            name = series if entry["width"] is None else f"{series} {entry['width']}"
            names[entry["mechanism"]] = name
            mechanisms.append(entry | {"mechanism": name, "series": series, "position": kind})
        rows += [row | {"mechanism": names[row["mechanism"]]} for row in part["rows"]]
    mechanisms.sort(key=lambda entry: entry["width"] or 0)  # stable: kinds stay together within a width
    return {"meta": meta, "mechanisms": mechanisms, "rows": rows}
