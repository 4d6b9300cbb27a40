"""Checks answers of Brevo, from the tokens alone."""

from collections.abc import Iterator
from typing import NamedTuple

from linattn.lab.tasks.synthetic.words import Words
from linattn.lab.tasks.text.batch import IGNORED

Name = tuple[int, ...]


class Question(NamedTuple):
    """``needed``: the names that the answer must contain; ``parents``: the names that must come before each."""

    needed: set[Name]
    parents: dict[Name, set[Name]]

    @classmethod
    def read(cls, tokens: list[int], words: Words, bos: int) -> "Question":
        """Read the tokens from ``bos`` to the mark of the answer."""
        mark = tokens.index(bos + 1)
        names = split(tokens[1:mark], words)
        parents: dict[Name, set[Name]] = {}
        for parent, child in zip(names[::2], names[1::2], strict=True):
            parents.setdefault(child, set()).add(parent)
        needed = set(split(tokens[mark + 1 : tokens.index(bos + 2)], words))
        waiting = list(needed)
        while waiting:
            new = parents.get(waiting.pop(), set()) - needed
            needed |= new
            waiting += new
        return cls(needed, parents)

    def ready(self, done: set[Name]) -> list[Name]:
        """The names that may come next after those in ``done``."""
        return [name for name in self.needed - done if self.parents.get(name, set()) <= done]


def right_answer(question: list[int], answer: list[int], words: Words, bos: int) -> bool:
    """Whether ``answer``, without ``eos``, has every needed name once, after its parents."""
    asked, done = Question.read(question, words, bos), set[Name]()
    for name in split(answer, words):
        if name not in asked.ready(done):
            return False
        done.add(name)
    return done == asked.needed


def chances(tokens: list[int], targets: list[int], words: Words, bos: int) -> Iterator[tuple[int, int, float]]:
    """``(place, token, chance)`` of every token that may follow, for each scored place of a window.

    All names that may come next are equally likely; inside a name, those that begin with its tokens so far.
    """
    begins = [place for place, token in enumerate(tokens) if token == bos]
    for begin, end in zip(begins, [*begins[1:], len(tokens)], strict=True):
        scored = sum(target != IGNORED for target in targets[begin:end])
        if scored:
            first = tokens.index(bos + 2, begin)
            asked = Question.read(tokens[begin : first + 1], words, bos)
            for step, token, chance in _steps(asked, tokens[first + 1 : end], scored, bos + 3):
                yield first + step, token, chance


def _steps(asked: Question, written: list[int], scored: int, eos: int) -> Iterator[tuple[int, int, float]]:
    begun: Name = ()
    done = set[Name]()
    for step in range(scored):
        waiting = [name for name in asked.ready(done) if name[: len(begun)] == begun]
        following = [name[len(begun)] for name in waiting] or [eos]
        for token in set(following):
            yield step, token, following.count(token) / len(following)
        if step < len(written):
            begun = (*begun, written[step])
            if begun in waiting:
                done.add(begun)
                begun = ()


def split(tokens: list[int], words: Words) -> list[Name]:
    """Split tokens into names; tokens after the last whole name become a name of their own, which matches none."""
    names: list[Name] = []
    begun: Name = ()
    for token in tokens:
        begun = (*begun, token)
        if words.longest == 1 or token > words.letters:
            names.append(begun)
            begun = ()
    return [*names, begun] if begun else names
