"""Level 3: an environment is a class, in a recipe `environment: scripts/examples/guessing_game.py:GuessingGame`.

`reset` gets the columns of the dataset's row that it has parameters for. Public methods are tools. A reward function is
not needed.
"""

from generation.trajectory import Trajectory


class GuessingGame:
    """A game in which the policy finds a number from 1 to 100 by asking whether it is larger."""

    def __init__(self, cost_per_question: float = 0.05) -> None:
        self.cost, self.questions = cost_per_question, 0

    def reset(self, answer: str) -> str:
        """Choose the number. The text that this returns is added to the prompt."""
        self.secret = int(answer)
        return "I am thinking of a number from 1 to 100. Ask, then answer with the number alone."

    def is_larger(self, than: int) -> str:
        """Tell if the number is larger.

        Args:
            than: the number to compare with
        """
        self.questions += 1
        return "yes" if self.secret > than else "no"

    def get_reward(self, trajectory: Trajectory) -> float:
        """Return 1 for the right number, less the cost of the questions; the text is the policy's last answer."""
        right = trajectory.text.strip() == str(self.secret)
        return float(right) - self.cost * self.questions
