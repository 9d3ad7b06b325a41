# make            build ./run            make story      build it and tell a story
# make test       build and run tests    make real       fetch three small real models
# make debug      ./run-debug with sanitizers; make test-debug runs the tests with them
# Variables instead of variants: make CC=clang, make OMP= (no threads), make CFLAGS=-O2
CC = cc
CFLAGS = -O3
WARN = -Wall -Wextra -Wshadow
SANITIZE = -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined
OMP := $(shell echo 'int main(void){return 0;}' > .omp.c; \
	$(CC) -fopenmp .omp.c -o .omp.out 2>/dev/null && echo -fopenmp; rm -f .omp.c .omp.out)
BUILD = $(CC) -std=c11 $(CFLAGS) $(WARN) $(OMP)

run: run.c Makefile
	$(BUILD) -o $@ run.c -lm
	@echo "built ./run $(if $(OMP),with OpenMP threads,without OpenMP: one thread)"

story: run
	./run models/story.gguf -t 0.8 -i "Once upon a time" $(ARGS)

test: test.c run.c Makefile
	$(BUILD) -o $@ test.c -lm
	./test $(ARGS)

debug: run.c Makefile
	$(BUILD) $(SANITIZE) -o run-debug run.c -lm

test-debug: test.c run.c Makefile
	$(BUILD) $(SANITIZE) -o test-debug test.c -lm
	ASAN_OPTIONS=detect_leaks=0 ./test-debug $(ARGS)

# what needs downloads: tests on what is found in models/real
test-real:
	$(MAKE) test ARGS=real

real: smollm2 gemma3 coder05
smollm2 gemma3 coder05:
	sh models/fetch.sh $@

clean:
	rm -f run test run-debug test-debug

.PHONY: story test debug test-debug test-real real smollm2 gemma3 coder05 clean
