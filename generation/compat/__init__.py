"""Other projects' generation interfaces, as adapters of the engine. Nothing else imports these."""
