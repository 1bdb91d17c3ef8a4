"""Texts for the tutorial: pairs of sentences, so that nothing has to be downloaded."""

from itertools import permutations

_SENTENCES = (
    "The river rises in the hills and reaches the sea after forty days.",
    "A bridge of nine arches was built where the road meets the river.",
    "In spring the farmers open the gates and water runs into the fields.",
    "The mill has two wheels, and one of them turns in dry summers too.",
    "Boats carry grain down to the harbour and salt back to the villages.",
    "The old lighthouse was replaced by a tower of steel in the last century.",
    "Its lamp turns once in twenty seconds and is seen from thirty miles away.",
    "Ships wait outside the harbour until the tide is high enough.",
    "The town has a market on every second Thursday of the month.",
    "People from the islands bring wool, cheese and smoked fish.",
    "A library of four thousand books was given to the town by a doctor.",
    "The school stands beside it, and its bell is older than the building.",
    "Children learn the names of the winds before those of the months.",
    "In winter the pass is closed and letters arrive a week late.",
    "The railway came first, the telegraph two years after it.",
    "An engineer measured the height of the mountain with a barometer.",
    "The glacier above the pass grows shorter by ten metres a year.",
    "Its water feeds three lakes, and the largest is as deep as a church is high.",
    "Birds rest on the lakes in October on their way to the south.",
    "No one has counted the bridges, but the guide speaks of sixty.",
    "The orchestra plays in the old station since the trains stop elsewhere.",
    "A painter lived above the station and drew every train that passed.",
)


def texts(number: int) -> list[str]:
    """Return ``number`` different texts of two sentences.

    Raises ``ValueError`` for more than there are.
    """
    pairs = [f"{first} {second}" for first, second in permutations(_SENTENCES, 2)]
    if number > len(pairs):
        raise ValueError(f"{number} texts are asked for, and there are {len(pairs)}")
    # Neighbours begin with different sentences.
    return [pairs[index * 101 % len(pairs)] for index in range(number)]
