import torch
from tests.convert.evaluate.tiny import tiny_llama

from linattn.convert.evaluate.measures import bytes_of, decoding, samples


def test_the_cache_of_softmax_is_its_keys_and_values_at_each_context():
    model = tiny_llama()
    rows = decoding(model, [40, 16], text=range(50), steps=3, piece=7)
    each = 2 * 2 * 2 * 8 * 4  # layers, keys and values, key heads, channels, bytes
    assert [(row["context"], row["cache_bytes"]) for row in rows] == [(16, 16 * each), (40, 40 * each)]
    assert rows[1]["read_seconds"] > rows[0]["read_seconds"] > 0
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert decoding(model, [16, 64], text=range(50), steps=3, piece=7, seconds=0.0) == []


def test_what_is_read_in_pieces_and_decoded_is_the_sequence_itself():
    """The same tokens reach the model, whatever the pieces: text first, then what it decodes itself."""
    seen = {}
    for piece in (5, 64):
        model, ids = tiny_llama(), []
        model.register_forward_pre_hook(lambda module, args, ids=ids: ids.extend(args[0][0].tolist()))
        decoding(model, [12, 20], text=torch.arange(9), steps=2, piece=piece)
        seen[piece] = ids
    assert seen[5] == seen[64]
    assert seen[5][:12] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2]
    assert seen[5][14:20] == [5, 6, 7, 8, 0, 1]  # two decoded tokens count as read


def test_bytes_see_through_objects_and_count_memory_once():
    class Holder:
        def __init__(self):
            self.big = torch.zeros(100)
            self.view = self.big[:1]
            self.me = self
            self.more = (None, {"x": [torch.zeros(3, dtype=torch.int8)]})

    assert bytes_of(Holder()) == 403


def test_samples_are_what_greedy_decoding_writes():
    class Letters:
        pad_token_id, eos_token_id = None, None

        def __call__(self, text, return_tensors):
            return {"input_ids": torch.tensor([list(text.encode())])}

        def decode(self, ids, skip_special_tokens):
            return ",".join(map(str, ids.tolist()))

    model = tiny_llama()
    found = samples(model, Letters(), ["ab", "cde"], max_new_tokens=3)
    for prompt, text in zip((b"ab", b"cde"), found, strict=True):  # the shorter one does not see what is before it
        ids = torch.tensor([list(prompt)])
        for _ in range(3):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
        assert text == ",".join(map(str, ids[0, -3:].tolist()))
    assert samples(model, Letters(), []) == []
