"""Words of needles and of the filler around them, as RULER has them (arXiv:2404.06654)."""

SENTENCES = (
    "The grass is green. ",
    "The sky is blue. ",
    "The sun is yellow. ",
    "Here we go. ",
    "There and back again. ",
)
ADJECTIVES = ("amber", "brave", "calm", "dusty", "eager", "faint", "grand", "hollow", "ivory", "jolly", "keen", "lone")
NOUNS = ("anchor", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor", "island", "jungle", "lantern")
