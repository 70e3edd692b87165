"""
GRPO with rollout correction for an agent, which plays a game in several turns: it guesses a number, and is told whether the
number is higher or lower.

    accelerate launch --config_file recipes/accelerate/single_gpu.yaml examples/agent.py --config recipes/grpo/agent.yaml

The game is an OpenEnv environment in this process; without the package (`openenv-core`) it has the form of one. Put your own
environment, or a client of it, in its place. The model needs a chat template with tools.
"""

import before_imports  # noqa: F401

from datasets import Dataset
from pydantic import BaseModel
from run import train

from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer


try:
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State
except ImportError:
    Action = Observation = BaseModel
    Environment = object

    class State(BaseModel):
        step_count: int = 0


LARGEST = 31
TASK = f"I think of a whole number from 0 to {LARGEST}. Find it with the tool `guess`, in as few guesses as you can."


class Guess(Action):
    number: int


class Answer(Observation):
    text: str
    reward: float = 0.0
    done: bool = False


class Game(Environment):
    """The environment. The reward is 1 for the first guess, and falls by 0.1 with each further one."""

    def reset(self, seed=None, episode_id=None, *, number: int, **kwargs) -> Answer:
        self.number, self.guesses = number, 0
        return Answer(text="")

    def step(self, action: Guess, timeout_s=None, **kwargs) -> Answer:
        self.guesses += 1
        if action.number == self.number:
            return Answer(text="Right.", reward=max(0.0, 1.1 - 0.1 * self.guesses), done=True)
        return Answer(text="It is higher." if action.number < self.number else "It is lower.")

    @property
    def state(self) -> State:
        return State(step_count=self.guesses)


class Player:
    """The game as the trainer takes it: each public method is a tool, and `get_reward` is the reward."""

    def __init__(self) -> None:
        self._game = Game()

    def reset(self, number: int, **row) -> None:
        self._last = self._game.reset(number=number)

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The guess.

        Returns:
            Whether it is right, or the number is higher or lower.
        """
        if not self._last.done:
            self._last = self._game.step(Guess(number=int(number)))
        return self._last.text

    def get_reward(self) -> float:
        return self._last.reward


def load_games(args, split: str, tokenizer):
    """Games: prompts, and the number to find as the argument of `reset`."""
    numbers = [(13 * i + (split != args.dataset_train_split)) % (LARGEST + 1) for i in range(1024)]
    prompt = [{"role": "user", "content": TASK}]
    return Dataset.from_dict({"prompt": [prompt] * len(numbers), "number": numbers})


def play(arguments: list[str] | None = None):
    trainer = RolloutCorrectedGRPOTrainer, RolloutCorrectedGRPOConfig
    return train(*trainer, __doc__, arguments, load_games, reward_funcs=None, environment_factory=Player)


if __name__ == "__main__":
    play()
