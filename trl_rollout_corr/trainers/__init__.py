"""The trainers. Only this part of the core imports TRL."""
