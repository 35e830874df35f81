"""textarena (https://github.com/LeonGuertler/TextArena): text games, in which each answer is a
move.

    rollout:
      environment: generation.rollouts.environments.textarena:TextArena
      kwargs: {id: GuessTheNumber-v0}

The data's column `seed` is passed to reset; without it, runs cannot be repeated. Games of several
players need an `opponent`, which plays for all players except the policy.
"""

from typing import Any

import textarena

from generation.importing import load


class TextArena:
    """A game in which the policy is player 0. Its reward is that of the finished game; 0 if the
    game is not over.
    """

    def __init__(self, id: str, players: int = 1, opponent: str | None = None, **kwargs: Any) -> None:
        """Make the game `id`; `kwargs` go to it. `opponent` is `pkg.mod:fn` or `file.py:fn`, a
        function that is called with all text that its player has read, and returns the player's
        move.

        The game is made without the wrappers that repeat its history in each observation, since a
        conversation has it.
        """
        if (players > 1) != (opponent is not None):
            raise ValueError(
                f"{id} has {players} players: set `opponent` if, and only if, there are more than one"
            )
        self._game = textarena.make(id if id.endswith("-raw") else f"{id}-raw", **kwargs)
        self._players = players
        self._opponent = load(opponent) if opponent is not None else None
        self._read: dict[int, str] = {}
        self._reward = 0.0

    def reset(self, seed: int | None = None) -> str:
        """Start the game, and return the rules and the first observation."""
        self._game.reset(num_players=self._players, seed=seed)
        return self._policys_turn() or ""

    def respond(self, answer: str) -> str | None:
        """Make the policy's move. Return the next observation, or None at the end."""
        return None if self._move(answer) else self._policys_turn()

    def get_reward(self) -> float:
        """Return the game's reward."""
        return self._reward

    def _move(self, action: str) -> bool:
        done, _ = self._game.step(action=action)
        if done:
            rewards, _ = self._game.close()
            self._reward = float((rewards or {}).get(0, 0.0))
        return bool(done)

    def _policys_turn(self) -> str | None:
        """Play until it is the policy's turn. Return what the policy reads, or None if the game
        ends before.
        """
        while True:
            player, messages = self._game.get_observation()
            # A player's own moves are left out, since the conversation has them already.
            text = "\n".join(message for sender, message, *_ in messages if sender != player)
            if player == 0 or self._opponent is None:
                return text
            self._read[player] = f"{self._read.get(player, '')}\n{text}".strip()
            if self._move(str(self._opponent(self._read[player]))):
                return None
