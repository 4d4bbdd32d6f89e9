// Tools that run in this page: what the model may call when a chat offers them.

const TOOLS = {
  add: {
    description: "Add two numbers.",
    properties: { a: { type: "integer" }, b: { type: "integer" } },
    run: ({ a, b }) => a + b,
  },
  get_time: {
    description: "Get the time in a city.",
    properties: { city: { type: "string" } },
    run: ({ city }) => {
      const name = `/${city.trim().replaceAll(" ", "_")}`.toLowerCase();
      const timeZone = Intl.supportedValuesOf("timeZone").find((zone) => zone.toLowerCase().endsWith(name));
      if (!timeZone) throw new Error(`no time zone is named after ${city}`);
      return new Date().toLocaleTimeString("en-GB", { timeZone, hour: "2-digit", minute: "2-digit" });
    },
  },
};

// In the form of OpenAI's Responses.
export const schemas = Object.entries(TOOLS).map(([name, { description, properties }]) => ({
  type: "function",
  name,
  description,
  parameters: { type: "object", properties, required: Object.keys(properties), additionalProperties: false },
}));

// What a call gives, as text. What goes wrong is for the model to know.
export function run({ name, arguments: given }) {
  try {
    if (!Object.hasOwn(TOOLS, name)) throw new Error(`this page has no tool ${name}`);
    const values = JSON.parse(given);
    for (const [key, { type }] of Object.entries(TOOLS[name].properties)) {
      const fits = type === "integer" ? Number.isInteger(values[key]) : typeof values[key] === type;
      if (!fits) throw new Error(`${key} is ${JSON.stringify(values[key])}, expected a ${type}`);
    }
    return String(TOOLS[name].run(values));
  } catch (error) {
    return `error: ${error.message}`;
  }
}
