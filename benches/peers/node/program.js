// Reads the commands that ../src/lib.rs describes, and prints what it measured:
// rate-limiter-flexible over ioredis, fixed windows by INCR.

import { once } from 'node:events';
import { createInterface } from 'node:readline';
import { Redis } from 'ioredis';
import { RateLimiterRedis } from 'rate-limiter-flexible';

const KEYS = 10_000;
const FLOODED = 256;
const HOT = 50_000;
const IN_FLIGHT = 256;
const SAMPLED = 16;
const DAY = 24 * 60 * 60;

const [variant, url] = process.argv.slice(2);
const keys = Array.from({ length: KEYS }, (_, index) => `user-${String(index).padStart(6, '0')}`);
let hot = 0;

const client = new Redis(url);
client.on('error', (error) => {
  console.log(`failed ${error}`);
  process.exit(1);
});
await once(client, 'ready');
const plenty = limiter('plenty', 60_000);
const one = limiter('one', 1);
const exact = limiter('exact', 1_000);
console.log('ready');

for await (const line of createInterface({ input: process.stdin })) {
  try {
    console.log(`ok ${await execute(line.split(' '))}`);
  } catch (error) {
    console.log(`failed ${String(error).replaceAll('\n', ' ')}`);
  }
}
process.exit(0);

function limiter(keyPrefix, points) {
  const options = { storeClient: client, keyPrefix, points, duration: DAY };
  if (variant === 'blocking') {
    options.inMemoryBlockOnConsumed = points;
  }
  return new RateLimiterRedis(options);
}

async function execute([command, ...words]) {
  switch (command) {
    case 'round':
      return round(words[0], Number(words[1]), Number(words[2]));
    case 'fill': {
      let index = 0;
      await requests(exact, () => keys[index++ % KEYS], KEYS);
      return '';
    }
    case 'exact':
      return requests(exact, () => 'user-exact', Number(words[0]));
    default:
      throw new Error(`no command ${command}`);
  }
}

async function check(limiter, key) {
  try {
    await limiter.consume(key);
    return 1;
  } catch (denied) {
    if (denied instanceof Error) {
      throw denied;
    }
    return 0;
  }
}

async function round(workload, inFlight, millis) {
  const limiter = workload === 'flood' ? one : plenty;
  const next = source(workload);
  const tally = { decisions: 0, admitted: 0, latencies: [] };
  const start = performance.now();
  const cpu = process.cpuUsage();
  const task = async (index) => {
    for (let own = index; performance.now() - start < millis; own += 1) {
      const begin = performance.now();
      const admitted = await check(limiter, next());
      tally.admitted += admitted;
      tally.decisions += 1;
      if (own % SAMPLED === 0) {
        tally.latencies.push(performance.now() - begin);
      }
    }
  };
  await Promise.all(Array.from({ length: inFlight }, (_, index) => task(index)));
  const wall = performance.now() - start;
  const { user, system } = process.cpuUsage(cpu);
  tally.latencies.sort((a, b) => a - b);
  const quantile = (percent) => {
    const index = Math.floor(((tally.latencies.length - 1) * percent) / 100);
    return Math.round((tally.latencies[index] ?? 0) * 1e6);
  };
  const nanos = [Math.round(wall * 1e6), (user + system) * 1_000];
  return [tally.decisions, tally.admitted, ...nanos, quantile(50), quantile(99)].join(' ');
}

function source(workload) {
  if (workload === 'hot') {
    return () => `user-hot-${String(Math.floor(hot++ / HOT)).padStart(6, '0')}`;
  }
  const count = workload === 'flood' ? FLOODED : KEYS;
  return () => keys[Math.floor(Math.random() * count)];
}

async function requests(limiter, next, count) {
  const task = async (index) => {
    let admitted = 0;
    for (let left = Math.floor((count + IN_FLIGHT - 1 - index) / IN_FLIGHT); left > 0; left -= 1) {
      admitted += await check(limiter, next());
    }
    return admitted;
  };
  const shares = await Promise.all(Array.from({ length: IN_FLIGHT }, (_, index) => task(index)));
  return shares.reduce((sum, share) => sum + share, 0);
}
