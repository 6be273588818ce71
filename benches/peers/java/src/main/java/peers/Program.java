package peers;

import com.sun.management.OperatingSystemMXBean;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.management.ManagementFactory;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.atomic.AtomicLong;
import java.util.function.Supplier;

/** Reads the commands that ../src/lib.rs describes, and prints what it measured. */
public final class Program {
    private static final int KEYS = 10_000;
    private static final int FLOODED = 256;
    private static final int HOT = 50_000;
    private static final int IN_FLIGHT = 256;

    private final Subject.Limiter plenty;
    private final Subject.Limiter one;
    private final Subject.Limiter exact;
    private final String[] keys = new String[KEYS];
    private final AtomicLong hot = new AtomicLong();

    private Program(Subject subject) {
        plenty = subject.limiter("plenty", 60_000);
        one = subject.limiter("one", 1);
        exact = subject.limiter("exact", 1_000);
        Arrays.setAll(keys, index -> String.format("user-%06d", index));
    }

    public static void main(String[] args) throws Exception {
        try {
            var subject =
                    switch (args[0]) {
                        case "redisson" -> new RedissonLimiter(args[1]);
                        case "redisson-semaphore" -> new RedissonSemaphore(args[1]);
                        default -> new Bucket4j(args[1]);
                    };
            var program = new Program(subject);
            System.out.println("ready");
            var input = new BufferedReader(new InputStreamReader(System.in));
            for (var line = input.readLine(); line != null; line = input.readLine()) {
                System.out.println(program.reply(line.split(" ")));
            }
        } catch (Exception error) {
            System.out.println("failed " + error);
        }
        // The threads of the clients would go on.
        System.exit(0);
    }

    private String reply(String[] words) {
        try {
            return "ok "
                    + switch (words[0]) {
                        case "round" ->
                                round(
                                        words[1],
                                        Integer.parseInt(words[2]),
                                        Long.parseLong(words[3]));
                        case "fill" -> fill();
                        case "exact" -> exact(Long.parseLong(words[1]));
                        default -> throw new IllegalArgumentException(words[0]);
                    };
        } catch (Throwable error) {
            return "failed " + error.toString().replace('\n', ' ');
        }
    }

    private String round(String workload, int inFlight, long millis) throws Exception {
        var limiter = workload.equals("flood") ? one : plenty;
        var end = System.nanoTime() + millis * 1_000_000;
        var chains = new ArrayList<Chain>();
        for (var task = 0; task < inFlight; task++) {
            chains.add(new Chain(limiter, source(workload, task), Long.MAX_VALUE, end));
        }
        var os = (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        long start = System.nanoTime();
        long cpuBefore = os.getProcessCpuTime();
        run(chains);
        long wall = System.nanoTime() - start;
        long cpu = os.getProcessCpuTime() - cpuBefore;
        var latencies = chains.stream().flatMapToLong(Chain::latencies).sorted().toArray();
        return String.format(
                "%d %d %d %d %d %d",
                chains.stream().mapToLong(Chain::decisions).sum(),
                chains.stream().mapToLong(Chain::admitted).sum(),
                wall,
                cpu,
                quantile(latencies, 50),
                quantile(latencies, 99));
    }

    private static long quantile(long[] sorted, int percent) {
        return sorted.length == 0 ? 0 : sorted[(sorted.length - 1) * percent / 100];
    }

    private Supplier<String> source(String workload, int task) {
        if (workload.equals("hot")) {
            return () -> String.format("user-hot-%06d", hot.getAndIncrement() / HOT);
        }
        var count = workload.equals("flood") ? FLOODED : KEYS;
        return new Supplier<>() {
            private long random = (task + 1) * 0x9e3779b97f4a7c15L;

            @Override
            public String get() {
                random ^= random << 13;
                random ^= random >>> 7;
                random ^= random << 17;
                return keys[(int) Long.remainderUnsigned(random, count)];
            }
        };
    }

    private String fill() throws Exception {
        var index = new AtomicLong();
        requests(exact, () -> keys[(int) (index.getAndIncrement() % KEYS)], KEYS);
        return "";
    }

    private String exact(long count) throws Exception {
        return Long.toString(requests(exact, () -> "user-exact", count));
    }

    private static long requests(Subject.Limiter limiter, Supplier<String> keys, long count)
            throws Exception {
        var chains = new ArrayList<Chain>();
        for (var task = 0; task < IN_FLIGHT; task++) {
            var share = (count + IN_FLIGHT - 1 - task) / IN_FLIGHT;
            chains.add(new Chain(limiter, keys, share, Long.MAX_VALUE));
        }
        run(chains);
        return chains.stream().mapToLong(Chain::admitted).sum();
    }

    private static void run(List<Chain> chains) throws Exception {
        chains.forEach(Chain::run);
        for (var chain : chains) {
            chain.await();
        }
    }
}
