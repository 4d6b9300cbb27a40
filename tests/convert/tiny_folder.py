"""A folder as users have them: a tiny random Llama with a tokenizer of bytes, and a text."""

from random import Random

from tests.convert.evaluate.tiny import tiny_llama


def byte_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def model_folder(folder, **options):
    tiny_llama(**options).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def text_file(path, words=1500):
    random = Random(0)
    names = ["river", "stone", "lamp", "cloud", "bread", "seven", "green", "slow"]
    path.write_text(" ".join(random.choice(names) for _ in range(words)) + ".")
    return path
