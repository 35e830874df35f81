"""Level 3: an environment is a class, in a recipe `environment: scripts/examples/guessing_game.py:GuessingGame`.

`reset` gets the columns of the dataset's row that it asks for, public methods are tools, and a reward function is not
needed.
"""

from generation.trajectory import Trajectory


class GuessingGame:
    """Find a number from 1 to 100 by asking whether it is larger."""

    def __init__(self, cost_per_question: float = 0.05) -> None:
        self.cost, self.questions = cost_per_question, 0

    def reset(self, answer: str) -> str:
        """The result is added to the prompt."""
        self.secret = int(answer)
        return "I am thinking of a number from 1 to 100. Ask, then answer with the number alone."

    def is_larger(self, than: int) -> str:
        """Whether the number is larger.

        Args:
            than: the number to compare with
        """
        self.questions += 1
        return "yes" if self.secret > than else "no"

    def get_reward(self, trajectory: Trajectory) -> float:
        """The trajectory's text is the policy's last answer."""
        right = trajectory.text.strip() == str(self.secret)
        return float(right) - self.cost * self.questions
