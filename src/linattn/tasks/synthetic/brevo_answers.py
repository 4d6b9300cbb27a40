"""Right answers of Brevo, read from the tokens alone."""

from collections.abc import Iterator
from typing import NamedTuple

from linattn.tasks.synthetic.words import Words
from linattn.tasks.text.batch import IGNORED

Name = tuple[int, ...]


class Question(NamedTuple):
    """``needed``: what the answer must hold; ``parents``: what must come before each."""

    needed: set[Name]
    parents: dict[Name, set[Name]]

    @classmethod
    def read(cls, tokens: list[int], words: Words, bos: int) -> "Question":
        """From ``bos`` to the mark of the answer."""
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
        """Those that may come next."""
        return [name for name in self.needed - done if self.parents.get(name, set()) <= done]


def right_answer(question: list[int], answer: list[int], words: Words, bos: int) -> bool:
    """Whether ``answer``, without its end, has all that is needed, once each and behind its parents."""
    asked, done = Question.read(question, words, bos), set[Name]()
    for name in split(answer, words):
        if name not in asked.ready(done):
            return False
        done.add(name)
    return done == asked.needed


def chances(tokens: list[int], targets: list[int], words: Words, bos: int) -> Iterator[tuple[int, int, float]]:
    """``(place, token, chance)`` of everything that may follow, for each scored place of a window.

    Of the names that may come next all are as likely; of one that has begun, those that begin alike are left.
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
    """Names; what is left behind the last whole one is a name of its own, and none that anybody has."""
    names: list[Name] = []
    begun: Name = ()
    for token in tokens:
        begun = (*begun, token)
        if words.longest == 1 or token > words.letters:
            names.append(begun)
            begun = ()
    return [*names, begun] if begun else names
