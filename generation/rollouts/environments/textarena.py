"""textarena (https://github.com/LeonGuertler/TextArena): games in text, in which each answer is a move.

    rollout:
      environment: generation.rollouts.environments.textarena:TextArena
      kwargs: {id: GuessTheNumber-v0}

A column `seed` of the data is given to reset; without one, runs cannot be repeated. Games of several players need an
`opponent`, which plays all others.
"""

from typing import Any

import textarena

from generation.importing import load


class TextArena:
    """The policy is player 0. Its reward is the game's, at the end; of a game that is not over, 0."""

    def __init__(self, id: str, players: int = 1, opponent: str | None = None, **kwargs: Any) -> None:
        """`opponent` is `pkg.mod:fn` or `file.py:fn`, called with all that a player has read; `kwargs` go to the game.

        The game comes without the wrappers that repeat its whole history in each observation: a conversation has it.
        """
        if (players > 1) != (opponent is not None):
            raise ValueError(f"{id} with {players} players: `opponent` is for the players beside the policy")
        self._game = textarena.make(id if id.endswith("-raw") else f"{id}-raw", **kwargs)
        self._players = players
        self._opponent = load(opponent) if opponent is not None else None
        self._read: dict[int, str] = {}
        self._reward = 0.0

    def reset(self, seed: int | None = None) -> str:
        """The rules, and what the first player sees."""
        self._game.reset(num_players=self._players, seed=seed)
        return self._policys_turn() or ""

    def respond(self, answer: str) -> str | None:
        """Make the policy's move; return what has happened since, or None at the end."""
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
        """Play until it is the policy's turn again; return what it then reads, or None if the game ends before."""
        while True:
            player, messages = self._game.get_observation()
            # Its own moves are in the conversation already.
            text = "\n".join(message for sender, message, *_ in messages if sender != player)
            if player == 0 or self._opponent is None:
                return text
            self._read[player] = f"{self._read.get(player, '')}\n{text}".strip()
            if self._move(str(self._opponent(self._read[player]))):
                return None
